"""Derive condition QuotaReserved of jobs that wait in a queue of Kueue."""

from stepkeeper_operator.api.v1alpha1.conditions import ConditionType, ConditionUpdate
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.facts import Workload
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.queueing import NO_WORKLOAD, NOT_QUEUED

__all__ = ["derive_quota"]

_UNKNOWN = (
    "Kueue's Workload of the JobSet is not known: Kueue has not made it yet, or this operator doesn't watch "
    "Workloads (kueue.enabled of its chart)"
)
_HELD = (
    "its JobSet was suspended as it was made, by none of this operator: a queue manages it (Kueue's "
    "manageJobsWithoutQueueName), whose Workload is not known yet. Whoever suspended it has to resume it"
)
_LEFT = "the job is in no queue: it has no JobSet, or no queue manages that"


def derive_quota(
    job: CheckpointedTrainingJob, observed: Observed, history: JobHistory
) -> tuple[ConditionUpdate, ...]:
    """Derive the condition of a job whose JobSet Kueue manages. Others don't have it.

    While pods of a JobSet that goes run down, the condition tells that it was Kueue's: their end is judged by that.
    """
    kind, jobset, workload = ConditionType.QUOTA_RESERVED, observed.jobset, observed.workload
    if workload is not None:
        reserved, message = workload.quota_reserved, _describe(workload)
        return (ConditionUpdate(type=kind, status=reserved, reason=workload.reason, message=message),)
    going = jobset is None or jobset.deleting
    if (going and not history.is_running) or (jobset is not None and not observed.is_queued):
        known = any(condition.type == kind for condition in job.status.conditions)
        return (ConditionUpdate(type=kind, status=None, reason=NOT_QUEUED, message=_LEFT),) if known else ()
    if jobset is None:
        return ()
    text = _HELD if jobset.born_suspended and jobset.suspend else _UNKNOWN
    return (ConditionUpdate(type=kind, status=None, reason=NO_WORKLOAD, message=text),)


def _describe(workload: Workload) -> str:
    """Give Kueue's words on the quota and, until it has some again, on why it was taken back."""
    evicted = workload.eviction
    if evicted is None:
        return workload.message
    said = f"Kueue evicted it ({evicted})"
    return said if workload.message in evicted else f"{workload.message}; {said}"
