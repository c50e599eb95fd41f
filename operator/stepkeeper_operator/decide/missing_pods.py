"""Find out that pods of the running attempt aren't made: a quota or an admission webhook refuses them, for example."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, ConditionType, find_condition
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.labels import JOB_NAME_LABEL
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempt_evidence import find_done
from stepkeeper_operator.policy.history import JobHistory

__all__ = ["NO_PODS", "compute_missing_s", "describe_missing"]

NO_PODS: Final = "NoPods"
_NORMAL_S: Final = 30
"""Seconds for which it is normal that no pod is made though not all exist."""


def compute_missing_s(
    job: CheckpointedTrainingJob, observed: Observed, history: JobHistory, *, now: float
) -> float | None:
    """Compute the seconds until pods that the running attempt lacks count as a problem: 0 or less if they do.

    The controllers make the pods of many hosts one after the other, and replace some: only a pause counts.

    Returns:
        The seconds; None if no pod is missing, or no attempt runs.

    """
    last = history.last_attempt
    if last is None or last.end is not None:
        return None
    n_done, done = find_done(observed, history)
    present = [pod for pod in observed.pods if pod.ordinal == history.ordinal]
    made = {pod.rank for pod in (*present, *done)}
    n_forgotten = max(0, n_done - len(done))  # only their Jobs count them
    if len(made) + n_forgotten >= observed.count_hosts(job):
        return None
    running = find_condition(job.status.conditions, ConditionType.RUNNING)
    lost_at = 0.0
    if running is not None:
        lost_at = now if running.status is ConditionStatus.TRUE else running.last_transition_time
    return max(last.start, lost_at, *(pod.created_at for pod in present)) + _NORMAL_S - now


def describe_missing(job: CheckpointedTrainingJob, n_present: int, n_hosts: int) -> str:
    """Describe that not all pods exist, and say where to look, as the end of a sentence about those that run."""
    name, describe = job.metadata.name, f"kubectl -n {job.metadata.namespace} describe"
    found = f", {n_present} of {n_hosts} exist, and no other" if n_present else ", and none"
    return (
        f"{found} was made for {_NORMAL_S} s. The events of its JobSet and Jobs say why: {describe} jobset "
        f"{name}; {describe} jobs -l {JOB_NAME_LABEL}={name}"
    )
