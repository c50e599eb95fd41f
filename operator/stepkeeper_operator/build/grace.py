"""Tell how long pods have at their end: what their manifest gives them, and what their machines leave of it."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.build.placement import on_spot
from stepkeeper_operator.facts import QueuedMachines

__all__ = ["AUTOCHECKPOINT_GRACE_S", "SPOT_GRACE_S", "choose_grace_s", "limit_grace_s", "on_spot_machines"]

SPOT_GRACE_S: Final = 15
"""Seconds that the kubelet of a Spot machine on GKE gives a pod, whatever its grace period says."""

AUTOCHECKPOINT_GRACE_S: Final = 300
"""Seconds that Cloud TPU waits for a training to save before maintenance, on nodes with autocheckpoint."""

_DEFAULT_GRACE_S: Final = 30
"""Kubernetes' own default."""


def choose_grace_s(job: CheckpointedTrainingJob, machines: QueuedMachines | None) -> int:
    """Choose the grace period in the manifest of the job's pods: the template's, else as long as the machines wait."""
    given: int | None = job.spec.template["spec"].get("terminationGracePeriodSeconds")
    if given is not None:
        return given
    return AUTOCHECKPOINT_GRACE_S if machines is not None and machines.autocheckpoint else _DEFAULT_GRACE_S


def limit_grace_s(pod_grace_s: int, job: CheckpointedTrainingJob, machines: QueuedMachines | None) -> int:
    """Return the seconds that a trainer can count on at its end, of those that its pod's manifest gives it."""
    if on_spot_machines(job, machines):
        return min(SPOT_GRACE_S, pod_grace_s)
    if machines is not None and machines.autocheckpoint:
        return min(AUTOCHECKPOINT_GRACE_S, pod_grace_s)
    return pod_grace_s


def on_spot_machines(job: CheckpointedTrainingJob, machines: QueuedMachines | None) -> bool:
    """Return True if the job runs on machines that the cloud takes away at a few seconds' notice."""
    return on_spot(job.spec.placement) or (machines is not None and machines.spot)
