"""Build the manifests of a job's objects. Pure: nothing here reads a clock or a cluster."""

from stepkeeper_operator.training_jobs.build.jobset import (
    build_jobset,
    machines_hash,
    queue_labels,
    template_hash,
)
from stepkeeper_operator.training_jobs.build.objects import build_config_map, config_map_name

__all__ = [
    "build_config_map",
    "build_jobset",
    "config_map_name",
    "machines_hash",
    "queue_labels",
    "template_hash",
]
