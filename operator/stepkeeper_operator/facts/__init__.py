"""Read objects of the API server into small frozen values that hold only what the operator uses."""

from stepkeeper_operator.facts.checkpoint_root import CheckpointRoot, JobRoot, read_job_root
from stepkeeper_operator.facts.jobset import (
    BatchJob,
    ConfigMap,
    JobSet,
    Workload,
    read_batch_job,
    read_config_map,
    read_jobset,
    read_workload,
)
from stepkeeper_operator.facts.node import Node, read_node
from stepkeeper_operator.facts.pod import Pod, read_pod
from stepkeeper_operator.facts.queued_resource import MaintenanceWindow, QueuedMachines, read_queued_machines

__all__ = [
    "BatchJob",
    "CheckpointRoot",
    "ConfigMap",
    "JobRoot",
    "JobSet",
    "MaintenanceWindow",
    "Node",
    "Pod",
    "QueuedMachines",
    "Workload",
    "read_batch_job",
    "read_config_map",
    "read_job_root",
    "read_jobset",
    "read_node",
    "read_pod",
    "read_queued_machines",
    "read_workload",
]
