"""Define the input of a decision about one QueuedResource, and what this process remembers of it.

A restart may forget all of the memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceStatus
from stepkeeper_operator.cloud_tpu.cloud import CloudOperationState, CloudTPUError, Place
from stepkeeper_operator.cloud_tpu.polling import Listing
from stepkeeper_operator.facts import Node

__all__ = ["CORDON_REST_S", "MemberPod", "Memory", "Observed", "Outcome", "ResourceMemory", "Verb"]

CORDON_REST_S: Final = 60.0
"""Seconds without cordons after a refused one. A drain is looked at every few seconds, and has hundreds of nodes."""


class Verb(StrEnum):
    """A request to the Cloud TPU API, by what it does."""

    LIST = "List"
    CREATE = "Create"
    DELETE = "Delete"
    LABEL = "Label"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPod:
    """A pod on a member that has to end before the member's machine goes: no DaemonSet's, and not finished."""

    namespace: str
    name: str
    uid: str
    node: str
    stopping: bool = False
    """Its deletion was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer to a request of ours that isn't in the status yet."""

    verb: Verb
    at: float
    """Unix time just before the request was sent."""

    operation: str = ""
    error: CloudTPUError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The cloud and the cluster around one QueuedResource at one moment."""

    cluster_id: str
    """Uid of namespace kube-system: the cluster's name in the cloud."""

    listing: Listing | None = None
    """The contents of its place in the cloud, asked for after our last request there. None: there is no answer."""

    error: CloudTPUError | None = None
    """Why there is no listing."""

    listed_at: float = 0.0
    """Unix time of the last listing that this operator got for it, else of the operator's start."""

    operation: CloudOperationState | None = None
    """The operation that the status names; None: it wasn't looked at."""

    outcome: Outcome | None = None
    members: tuple[Node, ...] = ()
    """Nodes of this cluster whose labels name the object: hosts of its cloud nodes."""

    refusals: Mapping[str, str] = field(default_factory=dict)
    """Why Node objects couldn't be deleted whose machines are gone, by their uids."""

    cordon_refused_at: float | None = None
    """Unix time at which the cordon of a member was last refused; None: none was, as far as this operator knows."""

    former: tuple[Node, ...] = ()
    """Nodes of this cluster that name objects which are gone, where this one has adopted machines."""

    pods: tuple[MemberPod, ...] | None = None
    """The pods on the members; None: they aren't looked at, for its machines aren't being removed."""

    script: str | None = None
    """The startup script, where the spec names one and it is about to be needed."""

    script_error: str = ""
    """Why there is no script."""


@dataclass(slots=True)
class ResourceMemory:
    """The memory of one object. Times are Unix seconds."""

    listed_at: float
    place: Place | None = None
    outcome: Outcome | None = None
    """The answer to our last request that isn't in the status yet."""

    last_cloud_write_at: float = 0.0
    """Lists that were asked for before it say nothing."""

    operation_read_at: float = 0.0
    refusals: dict[str, str] = field(default_factory=dict)
    """Why Node objects can't be deleted, by their uids."""

    cordon_refused_at: float | None = None
    unwritten: QueuedResourceStatus | None = None
    """A status that the API server refuses to keep, since the object's spec isn't valid."""


class Memory:
    """Keep a `ResourceMemory` for each object, by uid, and the id of the cluster."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._resources: dict[str, ResourceMemory] = {}
        self.cluster_id = ""

    def get(self, uid: str) -> ResourceMemory:
        """Return what is remembered of the object; of a new one, nothing."""
        return self._resources.setdefault(uid, ResourceMemory(listed_at=self._clock()))

    def forget(self, uid: str) -> Place | None:
        """Forget the object. Return its place if no other object is there."""
        gone = self._resources.pop(uid, None)
        if gone is None or any(other.place == gone.place for other in self._resources.values()):
            return None
        return gone.place
