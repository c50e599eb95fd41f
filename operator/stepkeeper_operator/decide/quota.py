"""Derive condition QuotaReserved of jobs that wait in a queue of Kueue."""

from stepkeeper_operator.api.v1alpha1.conditions import ConditionType
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.decision import ConditionUpdate
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.queueing import NOT_QUEUED

__all__ = ["derive_quota"]

_UNKNOWN = (
    "Kueue's Workload of the JobSet is not known: Kueue has not made it yet, or this operator doesn't watch "
    "Workloads (kueue.enabled of its chart)"
)


def derive_quota(job: CheckpointedTrainingJob, observed: Observed) -> tuple[ConditionUpdate, ...]:
    """Derive the condition of a job whose JobSet Kueue manages. Others don't have it."""
    kind, jobset, workload = ConditionType.QUOTA_RESERVED, observed.jobset, observed.workload
    if jobset is None:
        return ()
    if not observed.is_queued:
        known = any(condition.type == kind for condition in job.status.conditions)
        text = "no queue manages its JobSet"
        return (ConditionUpdate(type=kind, status=None, reason=NOT_QUEUED, message=text),) if known else ()
    if workload is None:
        return (ConditionUpdate(type=kind, status=None, reason="NoWorkload", message=_UNKNOWN),)
    reserved = workload.quota_reserved
    return (ConditionUpdate(type=kind, status=reserved, reason=workload.reason, message=workload.message),)
