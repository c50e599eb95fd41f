"""Define the input of a decision about one QueuedResource, and this process's memory, which is lost in a restart."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceStatus
from stepkeeper_operator.cloud_tpu.cloud import CloudOperationState, CloudTPUError, Place
from stepkeeper_operator.cloud_tpu.polling import Listing
from stepkeeper_operator.facts.node import Node

__all__ = ["CORDON_RETRY_S", "MemberPod", "Memory", "Observed", "Outcome", "ResourceMemory", "Verb"]

CORDON_RETRY_S: Final = 60.0
"""Seconds without cordons after a refusal: a drain is checked every few seconds, and has hundreds of nodes."""


class Verb(StrEnum):
    """The kinds of requests to the Cloud TPU API."""

    LIST = "List"
    CREATE = "Create"
    DELETE = "Delete"
    LABEL = "Label"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPod:
    """A pod on a member that has to end before its machine is removed: not of a DaemonSet, and not finished."""

    namespace: str
    name: str
    uid: str
    node: str
    stopping: bool = False
    """True if it is being deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer to a request that isn't in the status yet."""

    verb: Verb
    at: float
    """Unix time just before the request was sent."""

    operation: str = ""
    error: CloudTPUError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The state of the cloud and the cluster for one QueuedResource at one moment."""

    cluster_id: str
    """Uid of namespace kube-system: the cluster's id in the cloud."""

    listing: Listing | None = None
    """The contents of its place in the cloud, read after the last write there. None: there is no answer."""

    error: CloudTPUError | None = None
    """Why there is no listing."""

    listed_at: float = 0.0
    """Unix time of the last listing of its place, or of the operator's start."""

    operation: CloudOperationState | None = None
    """The operation that the status names; None: it wasn't read."""

    outcome: Outcome | None = None
    members: tuple[Node, ...] = ()
    """Nodes of this cluster whose labels name the object: hosts of its cloud nodes."""

    refusals: Mapping[str, str] = field(default_factory=dict)
    """Errors of the deletions of Node objects, by their uids."""

    cordon_refused_at: float | None = None
    """Unix time of the last refused cordon of a member; None: no refusal is known."""

    previous: tuple[Node, ...] = ()
    """Nodes of this cluster whose labels name deleted objects, if this one has adopted machines."""

    pods: tuple[MemberPod, ...] | None = None
    """The pods on the members; None: they weren't read, because its machines aren't being removed."""

    script: str | None = None
    """The startup script, if the spec names one and the next request needs it."""

    script_error: str = ""
    """Why there is no script."""


@dataclass(slots=True)
class ResourceMemory:
    """The memory of one object. Fields that `Observed` has too have the same meaning. Times are Unix seconds."""

    listed_at: float
    place: Place | None = None
    outcome: Outcome | None = None
    last_cloud_write_at: float = 0.0
    """Earlier lists are out of date."""

    operation_read_at: float = 0.0
    refusals: dict[str, str] = field(default_factory=dict)
    cordon_refused_at: float | None = None
    unwritten: QueuedResourceStatus | None = None
    """A status that the API server rejects because the object's spec is invalid."""


class Memory:
    """Keep a `ResourceMemory` for each object, by uid, and the id of the cluster."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._resources: dict[str, ResourceMemory] = {}
        self.cluster_id = ""

    def get(self, uid: str) -> ResourceMemory:
        """Return the memory of the object, which is empty for a new one."""
        return self._resources.setdefault(uid, ResourceMemory(listed_at=self._clock()))

    def forget(self, uid: str) -> Place | None:
        """Forget the object. Return its place if no other object is there."""
        gone = self._resources.pop(uid, None)
        if gone is None or any(other.place == gone.place for other in self._resources.values()):
            return None
        return gone.place
