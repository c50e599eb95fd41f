"""Define the decision about one QueuedResource, as values. `apply` carries it out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
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
from stepkeeper_operator.events import ObjectEvent
from stepkeeper_operator.facts import Node
from stepkeeper_operator.kinds.decision import KindDecision
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
    operator: ResourceOperatorState = field(compare=False)
    """Whether the object has adopted it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelNodes:
    """Write this object's labels on live cloud nodes, in this order."""

    place: Place
    owners: Mapping[str, str]
    """The uid that each node's label named when this was decided, by the node's id; empty: it had none."""

    labels: Mapping[str, str]
    version: ApiVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    member: Node
    undo: bool = False
    """Let pods come to the node again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relabel:
    """Let the node's labels name this object: they name one that is gone, whose machines this one has adopted."""

    member: Node


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictPod:
    """Ask for the pod's end with its grace period, as far as its disruption budget allows it."""

    pod: MemberPod


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteNode:
    """Delete the node's object: its machine is gone."""

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
"""Make condition Accepted, which is False unless `status` is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that isn't as it should be, and what to do: a part of condition Degraded."""

    reason: Reason
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next step with the cloud resource, before the status is filled in."""

    status: QueuedResourceStatus
    """With `operator`, operation and error as they will be. The mirror of the cloud isn't in it yet."""

    actions: tuple[Action, ...] = ()
    look_s: float | None = None
    accepted: ConditionUpdate | None = None
    """Set where the plan knows why the request isn't accepted."""

    problems: tuple[Problem, ...] = ()
    waiting: str = ""
    """The thing that it waits for, for condition Active."""

    events: tuple[ObjectEvent, ...] = ()
    """Created once, together with the status."""


class Decision(KindDecision[QueuedResourceStatus, Action]):
    """The result of a reconcile of one QueuedResource."""

    __slots__ = ()
