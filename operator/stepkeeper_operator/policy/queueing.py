"""Share a job with Kueue: it alone starts what has its label, and stops and resumes it by quota."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.machines import explain_loss, find_wait
from stepkeeper_operator.policy.starts import is_limit_reached

__all__ = ["has_left_queue", "is_queued", "leaves_queue", "should_suspend"]

_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"


def is_queued(job: CheckpointedTrainingJob) -> bool:
    """Return True if Kueue admits the job's JobSet, and unsuspends it."""
    return _QUEUE_LABEL in job.metadata.labels


def should_suspend(job: CheckpointedTrainingJob, history: JobHistory) -> bool:
    """Return True if the user suspends the job, or too many of its starts in a row came to nothing."""
    return job.spec.suspend or is_limit_reached(job, history)


def leaves_queue(job: CheckpointedTrainingJob, observed: Observed, history: JobHistory) -> bool:
    """Return True if the JobSet of a queued job has to go for the job to stop.

    Kueue would at once resume what it has admitted, and is suspended by somebody else. Without its JobSet the job
    holds no quota; a new one joins the queue once the job may start. Hosts that left for a moment cost no place in it.
    """
    wait = find_wait(job, observed)
    return is_queued(job) and (should_suspend(job, history) or (wait is not None and wait.stop))


def has_left_queue(job: CheckpointedTrainingJob, observed: Observed, *, now: float) -> bool:
    """Return True if a queued job's JobSet is gone, or going, because the job is to stop."""
    if not is_queued(job) or (observed.jobset is not None and not observed.jobset.deleting):
        return False
    return job.spec.suspend or explain_loss(job, observed, now=now) is not None
