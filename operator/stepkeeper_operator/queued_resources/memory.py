"""Remember what this process needs of each QueuedResource between two reconciles. A restart may forget all of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceStatus
from stepkeeper_operator.cloud_tpu.cloud import Place
from stepkeeper_operator.queued_resources.observed import Outcome, Refusal

__all__ = ["Memory", "ResourceMemory"]


@dataclass(slots=True)
class ResourceMemory:
    """The memory of one object. Times are Unix seconds."""

    listed_at: float
    place: Place | None = None
    outcome: Outcome | None = None
    """The answer to our last request that the status doesn't tell of yet."""

    last_cloud_write_at: float = 0.0
    """Lists that were asked for before it say nothing."""

    operation_read_at: float = 0.0
    cordon_refused_at: float | None = None
    """When the cordon of one of its nodes was last refused."""

    refused_deletions: dict[str, Refusal] = field(default_factory=dict)
    """Why Node objects can't be deleted, by their uids."""

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
