"""Derive condition Progressing: whether the training makes steps or commits, and advice if it does not.

A training is stalled if it has made neither for longer than a limit. Its pods are not ended: a hang, an evaluation and
an export look the same. Signs are the times since which the limit counts. The status has those of earlier operators.
"""

from functools import partial
from typing import Final

from stepkeeper.contract import ReportPhase
from stepkeeper_operator.api.v1alpha1.conditions import (
    Condition,
    ConditionStatus,
    ConditionType,
    ConditionUpdate,
    find_condition,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import ProgressStatus, TrainingJobStatus
from stepkeeper_operator.cache.reports import LastReport, has_advanced
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.training_jobs.attempts.attempt_pods import find_current_report, find_done
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["UNJUDGED", "derive_progressing", "is_stalled"]

UNJUDGED: Final = frozenset({Reason.NOT_RUNNING, Reason.UNREADABLE_SPEC})
"""Reasons of earlier conditions that do not apply to the running attempt."""

_update: Final = partial(ConditionUpdate, ConditionType.PROGRESSING)
_STEP_TIMEOUT_S: Final = 1800
"""Seconds that any step may take."""

_FACTOR: Final = 10
"""Factor by which the present step may exceed the longest step of the attempt so far."""

_FINISHED_TIMEOUT_S: Final = 3600
"""Seconds that the other pods have for their next step or commit after one pod has exited 0."""

_MAX_NAMED: Final = 3
"""The number of pods that a message names."""


def derive_progressing(
    view: View, history: JobHistory, progress: ProgressStatus | None, *, running: bool, received: bool | None
) -> tuple[tuple[ConditionUpdate, ...], float | None]:
    """Check whether the running attempt makes steps or commits, and return the seconds until the next check.

    Return no condition to keep the present one. `running`: all pods of the attempt run or have exited 0. `received`:
    reports arrive; None if that is unknown.
    """
    attempt = history.last_attempt
    if not running or attempt is None:
        return (_update(Reason.NOT_RUNNING, "not all pods of an attempt run", status=None),), None
    last = find_current_report(view.observed, history)
    report = last if received else None
    n_done, done = find_done(view, history)
    n_hosts = view.n_hosts
    limit_s = _find_limit_s(view.job, report, progress, n_done=n_done, n_hosts=n_hosts)
    left_s = None
    # The first report to an operator that has just started shows whether steps were made before.
    if limit_s is not None and received is not None:
        signs = [attempt.start, *(pod.finished_at or 0.0 for pod in done), *_list_signs(last)]
        left_s = max(*signs, *_list_recorded_signs(view, progress)) + limit_s - view.now
        if left_s <= 0:
            reason = Reason.PARTIALLY_FINISHED if n_done else Reason.STALLED
            prefix = _describe_done(n_hosts, n_done, done) if n_done else ""
            message = f"{prefix}{_describe_stall(last, progress, limit_s)}. {_advise(view.job)}"
            return (_update(reason, message, status=False),), None
    conditions = view.job.status.conditions if history.is_attempt_of(view.job.status) else ()
    before = find_condition(conditions, ConditionType.PROGRESSING)
    # A restarted operator that has no report yet keeps the condition that the last one set.
    keeps = received is None and before is not None and before.reason not in UNJUDGED
    # If all pods are done, no step can follow.
    if keeps or (n_done != n_hosts and _is_still_stalled(view.job, before, last, n_done)):
        return (), left_s
    return (_judge_by_reports(view.job, report, progress),), left_s


def is_stalled(status: TrainingJobStatus) -> bool:
    """Return True while the training is known to make no steps."""
    condition = find_condition(status.conditions, ConditionType.PROGRESSING)
    return condition is not None and condition.status is ConditionStatus.FALSE


def _find_limit_s(
    job: CheckpointedTrainingJob,
    report: LastReport | None,
    progress: ProgressStatus | None,
    *,
    n_done: int,
    n_hosts: int,
) -> int | None:
    """Find how many seconds may pass without a step or a commit; None if that is unknown, or no step is due."""
    if n_done:
        return _FINISHED_TIMEOUT_S if n_done < n_hosts else None
    longest_ms = None if progress is None else progress.longest_step_millis
    if report is None or longest_ms is None or _has_made_all_steps(job, report):
        return None
    if report.report.phase not in {ReportPhase.TRAINING, ReportPhase.SAVING}:
        return None  # a process that restarts in its pod first compiles and restores
    return max(_STEP_TIMEOUT_S, _FACTOR * longest_ms // 1000)


def _has_made_all_steps(job: CheckpointedTrainingJob, report: LastReport) -> bool:
    step, total = report.report.step, job.spec.total_steps
    reached = step is not None and total is not None and step >= total
    return reached or report.report.phase is ReportPhase.DONE


def _list_signs(report: LastReport | None) -> list[float]:
    times = () if report is None else (report.moved_at, report.committed_at)
    return [0.0, *(time for time in times if time is not None)]


def _list_recorded_signs(view: View, progress: ProgressStatus | None) -> list[float]:
    """List the times of the last step and commits in the status."""
    checkpoint = view.job.status.checkpoint
    commits = () if checkpoint is None else checkpoint.recent
    times = [None if progress is None else progress.last_progress_time, *(each.time for each in commits)]
    return [0.0, *(min(time, view.now) for time in times if time is not None)]


def _is_still_stalled(
    job: CheckpointedTrainingJob, before: Condition | None, report: LastReport | None, n_done: int
) -> bool:
    """Return True if condition `before` reports a stall, and the training has made no step or commit since."""
    if before is None or before.status is not ConditionStatus.FALSE:
        return False
    if before.reason == Reason.PARTIALLY_FINISHED and not n_done:
        return False  # the Job of the pod that was done was created again: all pods run
    if report is None:
        return True
    if _has_made_all_steps(job, report):
        return False
    # The first report to a new operator shows no change of the step: compare its step with the status.
    progress = job.status.progress
    advanced = has_advanced(report.report.step, None if progress is None else progress.step)
    return not advanced and max(_list_signs(report)) <= before.last_transition_time


def _judge_by_reports(
    job: CheckpointedTrainingJob, report: LastReport | None, progress: ProgressStatus | None
) -> ConditionUpdate:
    if report is None:
        return _update(Reason.NO_REPORTS, "no reports arrive: see condition Reporting", status=None)
    if _has_made_all_steps(job, report):
        return _update(Reason.ALL_STEPS_MADE, "", status=True)
    if progress is None or progress.longest_step_millis is None:
        text = "too few steps were reported in this attempt to know how long a step takes"
        return _update(Reason.NO_STEP_YET, text, status=None)
    return _update(Reason.STEPS_ADVANCE, "", status=True)


def _describe_done(n_hosts: int, n_done: int, done: list[Pod]) -> str:
    names = ", ".join(pod.name for pod in done[:_MAX_NAMED])
    more = ", …" if len(done) > _MAX_NAMED else ""
    named = f" ({names}{more})" if names else ""
    return f"{n_done} of {n_hosts} pods have exited 0{named}, and the others are still running; "


def _describe_stall(last: LastReport | None, progress: ProgressStatus | None, limit_s: int) -> str:
    """Describe the last step and its time. The text stays the same during a stall."""
    text = f"no step or commit was reported for {limit_s} s"
    if last is None or progress is None or progress.last_progress_time is None:
        return text
    return f"{text}: the last is step {progress.step} at {render_time(progress.last_progress_time)}"


def _advise(job: CheckpointedTrainingJob) -> str:
    kubectl = f"kubectl -n {job.metadata.namespace}"
    return (
        "No pod is stopped, since a long evaluation or export looks the same. To find where the training is, see the "
        f"stacks of all threads that stepkeeper wrote to the pods' logs ({kubectl} logs POD -c trainer), or use py-spy "
        f"dump in the pod for other programs. If the training hangs, delete one of its running pods ({kubectl} delete "
        "pod POD): all pods restart from the latest commit"
    )
