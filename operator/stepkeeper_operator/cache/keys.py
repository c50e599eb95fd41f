"""Name the objects that the operator reconciles: the keys of its queue and its cache."""

from typing import NamedTuple

from stepkeeper_operator.cluster.resources import QUEUED_RESOURCES, TRAINING_JOBS

__all__ = ["ObjectKey", "job_key", "queued_resource_key"]


class ObjectKey(NamedTuple):
    """The kind, namespace and name of an object that the operator reconciles."""

    kind: str
    """The Kubernetes Kind, such as CheckpointedTrainingJob."""

    namespace: str
    name: str

    @property
    def log_fields(self) -> dict[str, object]:
        """The pairs that name the object in a log line."""
        return {"kind": self.kind, "object": f"{self.namespace}/{self.name}"}


def job_key(namespace: str, name: str) -> ObjectKey:
    """Return the key of a CheckpointedTrainingJob. Its JobSet has the same namespace and name."""
    return ObjectKey(TRAINING_JOBS.kind, namespace, name)


def queued_resource_key(namespace: str, name: str) -> ObjectKey:
    """Return the key of a QueuedResource."""
    return ObjectKey(QUEUED_RESOURCES.kind, namespace, name)
