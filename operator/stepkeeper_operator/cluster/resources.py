"""List the kinds of objects that the operator reads or writes."""

from dataclasses import dataclass
from typing import Final

__all__ = [
    "BATCH_JOBS",
    "CONFIG_MAPS",
    "EVENTS",
    "JOBSETS",
    "LEASES",
    "NAMESPACES",
    "NODES",
    "PODS",
    "QUEUED_RESOURCES",
    "SECRETS",
    "TOKEN_REVIEWS",
    "TRAINING_JOBS",
    "WORKLOADS",
    "Resource",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A kind of object in the Kubernetes API, and the path to such objects."""

    api_version: str
    plural: str
    kind: str
    cluster_wide: bool = False
    """True for a kind that is listed in the whole cluster even if only some namespaces are watched."""

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    def path(
        self, namespace: str | None = None, name: str | None = None, subresource: str | None = None
    ) -> str:
        """Return the URL path of the collection, the object or its subresource."""
        parts = ["/apis" if self.group else "/api", self.api_version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, subresource) if part is not None]
        return "/".join(parts)


TRAINING_JOBS: Final = Resource(
    api_version="stepkeeper.dev/v1alpha1", plural="checkpointedtrainingjobs", kind="CheckpointedTrainingJob"
)
QUEUED_RESOURCES: Final = Resource(
    api_version="stepkeeper.dev/v1alpha1", plural="queuedresources", kind="QueuedResource"
)
JOBSETS: Final = Resource(api_version="jobset.x-k8s.io/v1alpha2", plural="jobsets", kind="JobSet")
WORKLOADS: Final = Resource(api_version="kueue.x-k8s.io/v1beta2", plural="workloads", kind="Workload")
BATCH_JOBS: Final = Resource(api_version="batch/v1", plural="jobs", kind="Job")
PODS: Final = Resource(api_version="v1", plural="pods", kind="Pod")
NODES: Final = Resource(api_version="v1", plural="nodes", kind="Node", cluster_wide=True)
NAMESPACES: Final = Resource(api_version="v1", plural="namespaces", kind="Namespace")
CONFIG_MAPS: Final = Resource(api_version="v1", plural="configmaps", kind="ConfigMap")
SECRETS: Final = Resource(api_version="v1", plural="secrets", kind="Secret")
EVENTS: Final = Resource(api_version="events.k8s.io/v1", plural="events", kind="Event")
LEASES: Final = Resource(
    api_version="coordination.k8s.io/v1", plural="leases", kind="Lease", cluster_wide=True
)
"""Those of all installations are compared."""

TOKEN_REVIEWS: Final = Resource(
    api_version="authentication.k8s.io/v1", plural="tokenreviews", kind="TokenReview"
)
