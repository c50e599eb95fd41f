"""The Kubernetes API as the operator uses it: plain objects in and out, errors of our own."""

from stepkeeper_operator.cluster.client import Cluster, KubernetesCluster, connect
from stepkeeper_operator.cluster.resources import (
    CONFIG_MAPS,
    EVENTS,
    JOBS,
    JOBSETS,
    LEASES,
    NODES,
    PODS,
    SECRETS,
    TOKEN_REVIEWS,
    TRAINING_JOBS,
    Resource,
)

__all__ = [
    "CONFIG_MAPS",
    "EVENTS",
    "JOBS",
    "JOBSETS",
    "LEASES",
    "NODES",
    "PODS",
    "SECRETS",
    "TOKEN_REVIEWS",
    "TRAINING_JOBS",
    "Cluster",
    "KubernetesCluster",
    "Resource",
    "connect",
]
