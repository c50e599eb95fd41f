"""Derive the conditions of a job, and its phase from them."""

from dataclasses import replace
from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import (
    Condition,
    ConditionStatus,
    ConditionType,
    ConditionUpdate,
    Phase,
)
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import ProgressStatus
from stepkeeper_operator.facts import JobSet, Workload
from stepkeeper_operator.training_jobs.attempts.following import NOT_QUEUED
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.decide.progressing import derive_progressing
from stepkeeper_operator.training_jobs.decide.refusals import add_refusals
from stepkeeper_operator.training_jobs.decide.running import (
    FINISHING,
    STOPPING,
    TRAINER_ENDED,
    derive_running,
)
from stepkeeper_operator.training_jobs.observed import View
from stepkeeper_operator.training_jobs.policy.machines import find_wait
from stepkeeper_operator.training_jobs.policy.plan import Plan
from stepkeeper_operator.training_jobs.policy.starts import explain_limit, should_suspend

__all__ = ["NO_NEW_CHECKPOINT", "NO_WORKLOAD", "derive_conditions", "derive_phase"]

_NOT_RUNNING: Final = "NotRunning"
_NOT_SUSPENDED: Final = "NotSuspended"
NO_NEW_CHECKPOINT: Final = "NoNewCheckpoint"
NO_WORKLOAD: Final = "NoWorkload"
"""Reason of condition QuotaReserved for a JobSet that somebody queues whose Workload isn't known."""


_NO_WORKLOAD_TEXT: Final = (
    "Kueue's Workload of the JobSet is not known: Kueue has not made it yet, or this operator doesn't watch "
    "Workloads (kueue.enabled of its chart)"
)
_HELD_TEXT: Final = (
    "its JobSet was suspended as it was made, by none of this operator: a queue manages it (Kueue's "
    "manageJobsWithoutQueueName), whose Workload is not known yet. Whoever suspended it has to resume it"
)
_LEFT_TEXT: Final = "the job is in no queue: it has no JobSet, or no queue manages that"


def derive_conditions(
    view: View, plan: Plan, accepted: ConditionUpdate, *, progress: ProgressStatus | None
) -> tuple[tuple[ConditionUpdate, ...], float | None]:
    """Derive all conditions of a running or ended job.

    Returns:
        The conditions, and the seconds until Reporting or Progressing has to be judged again; None if neither has.

    """
    running = derive_running(view, plan.history, waiting=plan.waiting)
    if plan.end is not None:
        running = replace(running, status=False, reason=plan.end.reason, message="the job is over")
    goes_on = running.status is True or running.reason == FINISHING
    reporting, look_s = _derive_reporting(view, plan.history, running=goes_on)
    heard = reporting.status if goes_on else None
    progressing, step_s = derive_progressing(view, plan.history, progress, running=goes_on, heard=heard)
    updates = [
        add_refusals(accepted, view.job, view.observed),
        running,
        _derive_suspended(view, plan),
    ]
    updates += _derive_quota(view, plan.history)
    # A restarted operator has no report yet: the judgement of the last one still stands.
    if reporting.status is not None or not _was_reported_before(view.job):
        updates.append(reporting)
    updates += progressing
    if plan.end is not None:
        updates.append(plan.end.to_condition_update())
    waits_s = [wait_s for wait_s in (look_s, step_s) if wait_s is not None]
    return tuple(updates), min(waits_s, default=None)


def derive_phase(conditions: tuple[Condition, ...], jobset: JobSet | None, history: JobHistory) -> Phase:
    """Sum up the conditions in one word. For a job that doesn't run, the history tells how it came to that."""
    true = {condition.type for condition in conditions if condition.status is ConditionStatus.TRUE}
    by_condition = (
        (ConditionType.COMPLETE, Phase.COMPLETE),
        (ConditionType.FAILED, Phase.FAILED),
        (ConditionType.SUSPENDED, Phase.SUSPENDED),
    )
    for kind, phase in by_condition:
        if kind in true:
            return phase
    if any(c.type == ConditionType.SUSPENDED and c.reason != _NOT_SUSPENDED for c in conditions):
        return Phase.SUSPENDING
    near_its_end = any(condition.reason in {TRAINER_ENDED, FINISHING} for condition in conditions)
    if ConditionType.RUNNING in true or near_its_end:
        return Phase.RUNNING
    no_quota = any(
        c.type == ConditionType.QUOTA_RESERVED and c.status is not ConditionStatus.TRUE for c in conditions
    )
    if no_quota and jobset is not None and jobset.suspend and not history.is_running:
        return Phase.QUEUED
    stopping = any(condition.reason == STOPPING for condition in conditions)
    if stopping or len(history.attempts) > 1 or (history.attempts and not history.is_running):
        return Phase.RESTARTING
    return Phase.PENDING if jobset is None else Phase.STARTING


def _derive_suspended(view: View, plan: Plan) -> ConditionUpdate:
    kind, jobset = ConditionType.SUSPENDED, view.jobset
    alive = sum(not pod.terminal for pod in view.observed.pods)
    stopped = (jobset is None or jobset.suspended or jobset.is_finished) and alive == 0
    if plan.end is not None or not should_suspend(view, plan.history):
        wait = None if plan.end is not None else find_wait(view)
        if wait is None or not (wait.stop or jobset is None or jobset.suspend):
            return ConditionUpdate(type=kind, status=False, reason=_NOT_SUSPENDED)
        return ConditionUpdate(type=kind, status=stopped, reason=wait.reason, message=wait.message)
    if view.job.spec.suspend:
        left = f"; {alive} of its pods have not ended yet" if alive else ""
        text = f"spec.suspend is true: set it to false to resume from the latest checkpoint{left}"
        return ConditionUpdate(
            type=kind, status=stopped, reason="Requested" if stopped else "Suspending", message=text
        )
    text = explain_limit(view.job, plan.history)
    return ConditionUpdate(type=kind, status=stopped, reason=NO_NEW_CHECKPOINT, message=text)


def _derive_reporting(
    view: View, history: JobHistory, *, running: bool
) -> tuple[ConditionUpdate, float | None]:
    """Check whether reports arrive. Also return in how many seconds to check again."""
    kind, silence_s = ConditionType.REPORTING, view.settings.silence_s
    if not running or history.last_attempt is None:
        return ConditionUpdate(type=kind, status=False, reason=_NOT_RUNNING, message="no attempt runs"), None
    report = view.observed.report
    if report is not None and report.ordinal == history.ordinal and view.now - report.received_at < silence_s:
        return ConditionUpdate(
            type=kind, status=True, reason="ReportsArrive"
        ), report.received_at + silence_s - view.now
    since = max(history.last_attempt.start, view.observed.operator_started_at)
    if report is not None and report.ordinal == history.ordinal:
        since = max(since, report.received_at)
    if view.now - since < silence_s:
        unknown = ConditionUpdate(
            type=kind, status=None, reason="NoReportYet", message="no report has arrived yet"
        )
        return unknown, since + silence_s - view.now
    message = (
        f"no report for {silence_s} s. Training goes on without reports; status shows what was last known. Likely: "
        "the training code doesn't use CheckpointManager.from_env(), it still starts, a NetworkPolicy keeps the pods "
        "from the operator's Service, or the trainer stands still"
    )
    return ConditionUpdate(type=kind, status=False, reason="NoReports", message=message), None


def _was_reported_before(job: CheckpointedTrainingJob) -> bool:
    """Check whether the status already judged the reports of an attempt that ran before this operator started."""
    conditions = {condition.type: condition for condition in job.status.conditions}
    running, reporting = conditions.get(ConditionType.RUNNING), conditions.get(ConditionType.REPORTING)
    was_running = running is not None and (
        running.status is ConditionStatus.TRUE or running.reason == FINISHING
    )
    return was_running and reporting is not None and reporting.reason != _NOT_RUNNING


def _derive_quota(view: View, history: JobHistory) -> tuple[ConditionUpdate, ...]:
    """Derive condition QuotaReserved of a job whose JobSet Kueue manages. Others don't have it.

    While pods of a JobSet that goes run down, the condition tells that it was Kueue's: their end is judged by that.
    """
    kind, jobset, workload = ConditionType.QUOTA_RESERVED, view.jobset, view.observed.workload
    if workload is not None:
        reserved, message = workload.quota_reserved, _describe_quota(workload)
        return (ConditionUpdate(type=kind, status=reserved, reason=workload.reason, message=message),)
    going = jobset is None or jobset.deleting
    if (going and not history.is_running) or (jobset is not None and not view.observed.is_queued):
        known = any(condition.type == kind for condition in view.job.status.conditions)
        return (
            (ConditionUpdate(type=kind, status=None, reason=NOT_QUEUED, message=_LEFT_TEXT),) if known else ()
        )
    if jobset is None:
        return ()
    text = _HELD_TEXT if jobset.born_suspended and jobset.suspend else _NO_WORKLOAD_TEXT
    return (ConditionUpdate(type=kind, status=None, reason=NO_WORKLOAD, message=text),)


def _describe_quota(workload: Workload) -> str:
    """Give Kueue's words on the quota and, until it has some again, on why it was taken back."""
    evicted = workload.eviction
    if evicted is None:
        return workload.message
    said = f"Kueue evicted it ({evicted})"
    return said if workload.message in evicted else f"{workload.message}; {said}"
