"""Send requests to the Kubernetes API with plain JSON objects and the operator's own errors."""

from stepkeeper_operator.cluster.client import KubernetesCluster, connect
from stepkeeper_operator.cluster.protocol import Cluster, guard_writes
from stepkeeper_operator.cluster.resources import (
    BATCH_JOBS,
    CONFIG_MAPS,
    EVENTS,
    JOBSETS,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    QUEUED_RESOURCES,
    SECRETS,
    TOKEN_REVIEWS,
    TRAINING_JOBS,
    WORKLOADS,
    Resource,
)

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
    "Cluster",
    "KubernetesCluster",
    "Resource",
    "connect",
    "guard_writes",
]
