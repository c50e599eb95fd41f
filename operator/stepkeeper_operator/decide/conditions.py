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
from stepkeeper_operator.decide.missing_pods import NO_PODS, compute_missing_s, describe_missing
from stepkeeper_operator.decide.progressing import derive_progressing
from stepkeeper_operator.decide.quota import derive_quota
from stepkeeper_operator.decide.refusals import add_refusals
from stepkeeper_operator.facts import JobSet, Pod
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempt_evidence import find_done
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.machines import find_wait
from stepkeeper_operator.policy.planning.plan import Plan
from stepkeeper_operator.policy.queueing import should_suspend
from stepkeeper_operator.policy.starts import explain_limit
from stepkeeper_operator.settings import OperatorSettings

__all__ = [
    "NO_NEW_CHECKPOINT",
    "derive_conditions",
    "derive_phase",
]

_NOT_RUNNING: Final = "NotRunning"
_NOT_SUSPENDED: Final = "NotSuspended"
NO_NEW_CHECKPOINT: Final = "NoNewCheckpoint"
_STARTING: Final = "Starting"
_STOPPING: Final = "Stopping"
"""A pod of the running attempt is being deleted, so the attempt is about to end."""

_TRAINER_ENDED: Final = "TrainerEnded"
"""A pod's trainer has ended, and another of its containers keeps the pod alive."""

_FINISHING: Final = "Finishing"
"""Pods have exited 0, and the others run or have as well."""


def derive_conditions(
    job: CheckpointedTrainingJob,
    observed: Observed,
    plan: Plan,
    accepted: ConditionUpdate,
    settings: OperatorSettings,
    *,
    progress: ProgressStatus | None,
    now: float,
) -> tuple[tuple[ConditionUpdate, ...], float | None]:
    """Derive all conditions of a running or ended job.

    Returns:
        The conditions, and the seconds until Reporting or Progressing has to be judged again; None if neither has.

    """
    running = _derive_running(job, observed, plan.history, waiting=plan.waiting, now=now)
    if plan.end is not None:
        running = replace(running, status=False, reason=plan.end.reason, message="the job is over")
    goes_on = running.status is True or running.reason == _FINISHING
    reporting, look_s = _derive_reporting(
        observed, plan.history, running=goes_on, now=now, silence_s=settings.silence_s
    )
    heard = reporting.status if goes_on else None
    progressing, step_s = derive_progressing(
        job, observed, plan.history, progress, running=goes_on, heard=heard, now=now
    )
    updates = [
        add_refusals(accepted, job, observed),
        running,
        _derive_suspended(job, observed, plan, now=now),
    ]
    updates += derive_quota(job, observed, plan.history)
    # A restarted operator has no report yet: the judgement of the last one still stands.
    if reporting.status is not None or not _was_reported_before(job):
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
    near_its_end = any(condition.reason in {_TRAINER_ENDED, _FINISHING} for condition in conditions)
    if ConditionType.RUNNING in true or near_its_end:
        return Phase.RUNNING
    no_quota = any(
        c.type == ConditionType.QUOTA_RESERVED and c.status is not ConditionStatus.TRUE for c in conditions
    )
    if no_quota and jobset is not None and jobset.suspend and not history.is_running:
        return Phase.QUEUED
    stopping = any(condition.reason == _STOPPING for condition in conditions)
    if stopping or len(history.attempts) > 1 or (history.attempts and not history.is_running):
        return Phase.RESTARTING
    return Phase.PENDING if jobset is None else Phase.STARTING


def _derive_running(
    job: CheckpointedTrainingJob,
    observed: Observed,
    history: JobHistory,
    *,
    waiting: str | None,
    now: float,
) -> ConditionUpdate:
    """Check whether all pods of the present attempt run. If not, the message says what they wait for."""
    kind = ConditionType.RUNNING
    if observed.jobset is None:
        return ConditionUpdate(
            type=kind, status=False, reason="NoJobSet", message=waiting or "its JobSet is being made"
        )
    n_hosts = observed.count_hosts(job)
    present = [pod for pod in observed.pods if pod.ordinal == history.ordinal]
    alive = [pod for pod in present if pod.phase == "Running" and pod.started and pod.deadline is None]
    running = [pod for pod in alive if pod.exit_code is None]
    n_done, _ = find_done(observed, history)
    if n_done and n_done + len(running) >= n_hosts:
        # The job is over when JobSet says so.
        message = f"{n_done} of {n_hosts} pods have exited 0"
        return ConditionUpdate(type=kind, status=False, reason=_FINISHING, message=message)
    if not history.is_running:
        last = history.last_attempt
        ended = last.cause if last is not None and last.cause else "it has not started"
        return ConditionUpdate(
            type=kind, status=False, reason="Ended", message=waiting or f"the last attempt ended: {ended}"
        )
    if len(running) >= n_hosts:
        return ConditionUpdate(
            type=kind, status=True, reason="AllPodsRun", message=f"{n_hosts} of {n_hosts} pods run"
        )
    outlived = next((pod for pod in alive if pod.exit_code is not None and pod.others_running), None)
    if outlived is not None:
        return ConditionUpdate(
            type=kind, status=False, reason=_TRAINER_ENDED, message=_describe_outlived(outlived)
        )
    reason, detail = _find_obstacle(present)
    missing_s = compute_missing_s(job, observed, history, now=now)
    if reason == _STARTING and missing_s is not None and missing_s <= 0:
        reason, detail = NO_PODS, describe_missing(job, len(present), n_hosts)
    message = f"{len(running)} of {n_hosts} pods run{detail}"
    return ConditionUpdate(type=kind, status=False, reason=reason, message=message)


def _describe_outlived(pod: Pod) -> str:
    names = ", ".join(repr(name) for name in pod.others_running)
    return (
        f"the trainer of {pod.name} exited with code {pod.exit_code}, and container {names} still runs: the pod "
        "ends only with all of them. Move what is to end with the trainer to initContainers with "
        "restartPolicy: Always"
    )


def _find_obstacle(pods: list[Pod]) -> tuple[str, str]:
    for pod in pods:
        if pod.deadline is not None:
            return _STOPPING, f"; {pod.name} on node {pod.node} is being stopped"
    for pod in pods:
        if pod.waiting:
            reason = pod.waiting.partition(":")[0]
            return reason if reason.isalnum() else "Waiting", f"; {pod.name} waits: {pod.waiting}"
    return _STARTING, ""


def _derive_suspended(
    job: CheckpointedTrainingJob, observed: Observed, plan: Plan, *, now: float
) -> ConditionUpdate:
    kind, jobset = ConditionType.SUSPENDED, observed.jobset
    alive = sum(not pod.terminal for pod in observed.pods)
    stopped = (jobset is None or jobset.suspended or jobset.is_finished) and alive == 0
    if plan.end is not None or not should_suspend(job, observed, plan.history, now=now):
        wait = None if plan.end is not None else find_wait(job, observed)
        if wait is None or not (wait.stop or jobset is None or jobset.suspend):
            return ConditionUpdate(type=kind, status=False, reason=_NOT_SUSPENDED)
        return ConditionUpdate(type=kind, status=stopped, reason=wait.reason, message=wait.message)
    if job.spec.suspend:
        left = f"; {alive} of its pods have not ended yet" if alive else ""
        text = f"spec.suspend is true: set it to false to resume from the latest checkpoint{left}"
        return ConditionUpdate(
            type=kind, status=stopped, reason="Requested" if stopped else "Suspending", message=text
        )
    text = explain_limit(job, plan.history)
    return ConditionUpdate(type=kind, status=stopped, reason=NO_NEW_CHECKPOINT, message=text)


def _derive_reporting(
    observed: Observed, history: JobHistory, *, running: bool, now: float, silence_s: int
) -> tuple[ConditionUpdate, float | None]:
    """Check whether reports arrive. Also return in how many seconds to check again."""
    kind = ConditionType.REPORTING
    if not running or history.last_attempt is None:
        return ConditionUpdate(type=kind, status=False, reason=_NOT_RUNNING, message="no attempt runs"), None
    report = observed.report
    if report is not None and report.ordinal == history.ordinal and now - report.received_at < silence_s:
        return ConditionUpdate(
            type=kind, status=True, reason="ReportsArrive"
        ), report.received_at + silence_s - now
    since = max(history.last_attempt.start, observed.operator_started_at)
    if report is not None and report.ordinal == history.ordinal:
        since = max(since, report.received_at)
    if now - since < silence_s:
        unknown = ConditionUpdate(
            type=kind, status=None, reason="NoReportYet", message="no report has arrived yet"
        )
        return unknown, since + silence_s - now
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
        running.status is ConditionStatus.TRUE or running.reason == _FINISHING
    )
    return was_running and reporting is not None and reporting.reason != _NOT_RUNNING
