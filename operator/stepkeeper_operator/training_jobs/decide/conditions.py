"""Derive the conditions of a job, and its phase from them."""

from dataclasses import replace
from functools import partial
from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import (
    Condition,
    ConditionStatus,
    ConditionType,
    ConditionUpdate,
    Phase,
    find_condition,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob_status import ProgressStatus
from stepkeeper_operator.facts.jobset import JobSet, Workload
from stepkeeper_operator.kinds.decision import find_soonest
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.decide.acceptance import add_refusals
from stepkeeper_operator.training_jobs.decide.progressing import UNJUDGED, derive_progressing
from stepkeeper_operator.training_jobs.decide.running import derive_running
from stepkeeper_operator.training_jobs.observed import View
from stepkeeper_operator.training_jobs.policy.machines import find_wait
from stepkeeper_operator.training_jobs.policy.plan import Plan
from stepkeeper_operator.training_jobs.policy.starts import explain_limit, should_suspend

__all__ = ["derive_conditions", "derive_phase"]

_reporting: Final = partial(ConditionUpdate, ConditionType.REPORTING)
_quota: Final = partial(ConditionUpdate, ConditionType.QUOTA_RESERVED)
_suspended: Final = partial(ConditionUpdate, ConditionType.SUSPENDED)
_NO_WORKLOAD_TEXT: Final = (
    "The JobSet's Workload is not known: Kueue has not created it yet, or this operator does not watch "
    "Workloads (chart value kueue.enabled)"
)
_FOREIGN_SUSPENDED_TEXT: Final = (
    "another controller suspended the JobSet at its creation and has to resume it (Kueue with "
    "manageJobsWithoutQueueName, for example). Its Workload is not known yet"
)
_NOT_QUEUED_TEXT: Final = "the job is not queued: it has no JobSet, or no queue manages its JobSet"


def derive_conditions(
    view: View, plan: Plan, accepted: ConditionUpdate, *, progress: ProgressStatus | None
) -> tuple[tuple[ConditionUpdate, ...], float | None]:
    """Derive all conditions of a running or ended job, and the seconds until one has to be judged again, if any."""
    running = derive_running(view, plan.history, waiting=plan.waiting)
    if plan.end is not None:
        running = replace(running, status=False, reason=plan.end.reason, message="the job has ended")
    active = running.status is True or running.reason == Reason.FINISHING  # all pods run or have exited 0
    reporting, look_s = _derive_reporting(view, plan.history, running=active)
    received = reporting.status if active else None
    progressing, step_s = derive_progressing(view, plan.history, progress, running=active, received=received)
    updates = [add_refusals(accepted, view), running, _derive_suspended(view, plan)]
    updates += _derive_quota(view, plan.history)
    before = find_condition(view.job.status.conditions, ConditionType.REPORTING)
    # A restarted operator has no report yet: keep the condition that the last one set.
    if reporting.reason is not Reason.NO_REPORT_YET or before is None or before.reason in UNJUDGED:
        updates.append(reporting)
    updates += progressing
    unfinished = ConditionUpdate(type=ConditionType.FINISHED, status=False, reason=Reason.NOT_FINISHED)
    updates += (unfinished,) if plan.end is None else plan.end.to_condition_updates()
    return tuple(updates), find_soonest(look_s, step_s)


def derive_phase(conditions: tuple[Condition, ...], jobset: JobSet | None, history: JobHistory) -> Phase:
    """Summarize the conditions in one word. The history decides the phase of a job that does not run."""
    true = {condition.type for condition in conditions if condition.status is ConditionStatus.TRUE}
    for kind in (ConditionType.COMPLETE, ConditionType.FAILED, ConditionType.SUSPENDED):
        if kind in true:
            return Phase(kind.value)
    suspended = find_condition(conditions, ConditionType.SUSPENDED)
    if suspended is not None and suspended.reason != Reason.NOT_SUSPENDED:
        return Phase.SUSPENDING  # its pods still stop
    finishing = any(condition.reason in {Reason.TRAINER_ENDED, Reason.FINISHING} for condition in conditions)
    if ConditionType.RUNNING in true or finishing:
        return Phase.RUNNING
    queued = find_condition(conditions, ConditionType.QUOTA_RESERVED) is not None
    no_quota = queued and ConditionType.QUOTA_RESERVED not in true
    if no_quota and jobset is not None and jobset.suspend and not history.is_running:
        return Phase.QUEUED
    stopping = any(condition.reason == Reason.STOPPING for condition in conditions)
    if stopping or len(history.attempts) > 1 or (history.attempts and not history.is_running):
        return Phase.RESTARTING
    return Phase.PENDING if jobset is None else Phase.STARTING


def _derive_suspended(view: View, plan: Plan) -> ConditionUpdate:
    jobset, n_alive = view.jobset, sum(not pod.terminal for pod in view.observed.pods)
    stopped = (jobset is None or jobset.suspended or jobset.is_finished) and n_alive == 0
    if plan.end is not None:
        return _suspended(Reason.NOT_SUSPENDED, status=False)
    if view.job.spec.suspend:
        left = f"; pods that have not ended yet: {n_alive}" if n_alive else ""
        text = f"spec.suspend is true: set it to false to resume from the latest checkpoint{left}"
        return _suspended(Reason.REQUESTED if stopped else Reason.SUSPENDING, text, status=stopped)
    if should_suspend(view, plan.history):
        return _suspended(Reason.NO_NEW_CHECKPOINT, explain_limit(view.job, plan.history), status=stopped)
    wait = find_wait(view)
    # Hosts that left for a moment stop no running pods.
    if wait is not None and (wait.stop or jobset is None or jobset.suspend):
        return _suspended(wait.reason, wait.message, status=stopped)
    return _suspended(Reason.NOT_SUSPENDED, status=False)


def _derive_reporting(
    view: View, history: JobHistory, *, running: bool
) -> tuple[ConditionUpdate, float | None]:
    """Check whether reports arrive, and return after how many seconds to check again."""
    silence_s = view.settings.silence_s
    if not running or history.last_attempt is None:
        return _reporting(Reason.NOT_RUNNING, "no attempt runs", status=None), None
    report = view.observed.report
    if report is not None and report.ordinal == history.ordinal:
        left_s = report.received_at + silence_s - view.now
        if left_s > 0:
            return _reporting(Reason.REPORTS_RECEIVED, status=True), left_s
    # Before that, this operator could receive no report of the attempt.
    left_s = max(history.last_attempt.start, view.observed.operator_started_at) + silence_s - view.now
    if left_s > 0:
        return _reporting(Reason.NO_REPORT_YET, "no report has arrived yet", status=None), left_s
    message = (
        f"no report for {silence_s} s. Training continues without reports, and status shows the last known state. "
        "Check that the training code uses CheckpointManager.from_env() and has started, that no NetworkPolicy blocks "
        "the operator's Service, and that the trainer is not stuck"
    )
    return _reporting(Reason.NO_REPORTS, message, status=False), None


def _derive_quota(view: View, history: JobHistory) -> tuple[ConditionUpdate, ...]:
    """Derive condition QuotaReserved of a job whose JobSet Kueue manages. A job that Kueue never managed lacks it.

    Return no condition to keep the present one. While the pods of a deleted JobSet end, it shows that Kueue managed
    the JobSet: the end of the attempt is judged by that.
    """
    jobset, workload = view.jobset, view.observed.workload
    if workload is not None:
        reserved, message = workload.quota_reserved, _describe_quota(workload)
        reason = Reason.QUOTA_RESERVED if reserved else Reason.WAITING_FOR_QUOTA
        return (_quota(reason, message, status=reserved),)
    left_queue = not history.is_running and (jobset is None or jobset.deleting)
    if left_queue or (jobset is not None and not view.observed.is_queued):
        before = find_condition(view.job.status.conditions, ConditionType.QUOTA_RESERVED)
        return () if before is None else (_quota(Reason.NOT_QUEUED, _NOT_QUEUED_TEXT, status=None),)
    if jobset is None:
        return ()
    foreign = jobset.created_suspended and jobset.suspend
    return (
        _quota(Reason.NO_WORKLOAD, _FOREIGN_SUSPENDED_TEXT if foreign else _NO_WORKLOAD_TEXT, status=None),
    )


def _describe_quota(workload: Workload) -> str:
    """Return Kueue's message on the quota and, until quota is reserved again, on its eviction."""
    evicted = workload.eviction
    if evicted is None:
        return workload.message
    text = f"Kueue evicted the job ({evicted}); it is queued again and resumes from the latest commit"
    return text if workload.message in evicted else f"{workload.message}; {text}"
