"""Share a job with Kueue: it alone starts the JobSets that it manages, and stops and resumes them by quota."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionType
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.machines import explain_loss, find_wait
from stepkeeper_operator.policy.starts import is_limit_reached

__all__ = ["NOT_QUEUED", "NO_WORKLOAD", "has_left_queue", "leaves_queue", "should_suspend"]

NOT_QUEUED: Final = "NotQueued"
"""Reason of condition QuotaReserved of a job that has left Kueue's queues."""

NO_WORKLOAD: Final = "NoWorkload"
"""Its reason for a JobSet that somebody queues whose Workload isn't known."""


def should_suspend(
    job: CheckpointedTrainingJob, observed: Observed, history: JobHistory, *, now: float
) -> bool:
    """Return True if the user suspends the job, or too many of its starts in a row came to nothing."""
    return job.spec.suspend or is_limit_reached(job, observed, history, now=now)


def leaves_queue(
    job: CheckpointedTrainingJob, observed: Observed, history: JobHistory, *, now: float
) -> bool:
    """Return True if the JobSet of a queued job has to go for the job to stop.

    Kueue would at once resume what it has admitted, and is suspended by somebody else. Without its JobSet the job
    holds no quota; a new one joins the queue once the job may start. Hosts that left for a moment cost no place in it.
    """
    wait = find_wait(job, observed)
    stops = should_suspend(job, observed, history, now=now) or (wait is not None and wait.stop)
    return observed.is_queued and stops


def has_left_queue(job: CheckpointedTrainingJob, observed: Observed, *, now: float) -> bool:
    """Return True if a queued job's JobSet is gone, or going, because the job is to stop."""
    jobset = observed.jobset
    if not (_was_queued(job) if jobset is None else observed.is_queued and jobset.deleting):
        return False
    return job.spec.suspend or explain_loss(job, observed, now=now) is not None


def _was_queued(job: CheckpointedTrainingJob) -> bool:
    """Tell whether Kueue managed the last JobSet: the status says so when there is none any more."""
    kind = ConditionType.QUOTA_RESERVED
    return any(c.type == kind and c.reason != NOT_QUEUED for c in job.status.conditions)
