"""Define the decision about one QueuedResource, as values. `apply` carries it out."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceStatus,
    ResourceOperatorState,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudRequest, Place
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.kinds.decision import KindDecision, ObjectEvent
from stepkeeper_operator.queued_resources.observed import MemberPod

__all__ = [
    "Action",
    "Cordon",
    "CreateCloudResource",
    "Decision",
    "DeleteCloudResource",
    "DeleteNode",
    "EvictPod",
    "LabelNodes",
    "Plan",
    "Problem",
    "Relabel",
    "SetFinalizer",
    "judge_accepted",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFinalizer:
    """Set the operator's finalizer, or remove it."""

    present: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateCloudResource:
    request: CloudRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteCloudResource:
    """Delete a queued resource together with its machines."""

    place: Place
    cloud_id: str
    request_id: str
    version: ApiVersion
    operator: ResourceOperatorState
    """The object's private status, by which `apply` checks again that the resource is still the object's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelNodes:
    """Set this object's labels on nodes of the cloud that it adopts, in the order of `owners`."""

    place: Place
    owners: Mapping[str, str]
    """By node id, the uid in the node's label at the time of the decision; empty if it had none.

    `apply` stops at the first node whose label has another uid by then.
    """

    labels: Mapping[str, str]
    version: ApiVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    member: Node
    undo: bool = False
    """True: uncordon the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relabel:
    """Set this object's labels on the Kubernetes node of a machine that it has adopted from a deleted object."""

    member: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictPod:
    """Evict the pod with its grace period, if its disruption budget allows it."""

    pod: MemberPod


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteNode:
    """Delete the Node object of a deleted machine."""

    member: Node


Action: TypeAlias = (
    SetFinalizer
    | CreateCloudResource
    | DeleteCloudResource
    | LabelNodes
    | Cordon
    | Relabel
    | EvictPod
    | DeleteNode
)


judge_accepted: Final = partial(ConditionUpdate, QueuedResourceConditionType.ACCEPTED, status=False)
"""Make condition Accepted, with status False by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem, and what to do about it: a part of condition Degraded."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next step with the cloud resource, before the status is filled in."""

    status: QueuedResourceStatus
    """The status with a new `operator`, `operation` and `error`. The mirror of the cloud is added later."""

    actions: tuple[Action, ...] = ()
    requeue_after_s: float | None = None
    accepted: ConditionUpdate | None = None
    """Set if the plan knows why the request isn't accepted."""

    problems: tuple[Problem, ...] = ()
    waiting: str = ""
    """The event that the object waits for, in words for condition Active; empty if it waits for none."""

    events: tuple[ObjectEvent, ...] = ()
    """Events to create once, together with the status."""


class Decision(KindDecision[QueuedResourceStatus, Action]):
    """The result of a reconcile of one QueuedResource."""

    __slots__ = ()
