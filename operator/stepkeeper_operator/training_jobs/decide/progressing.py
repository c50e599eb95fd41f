"""Derive condition Progressing: whether the training makes steps or commits, and advice if it does not.

The pods report a hang. Whether they run on for long beside one that is done, only the operator knows. Signs are the
times since which that limit counts.
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
from stepkeeper_operator.labels import JOB_NAME_LABEL
from stepkeeper_operator.training_jobs.attempts.attempt_pods import find_current_report, find_done
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.attempts.start_deadline import find_unstarted_since
from stepkeeper_operator.training_jobs.build.objects import restart_command
from stepkeeper_operator.training_jobs.decide.hangs import explain_hang, find_hang
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["UNJUDGED", "derive_progressing", "is_stalled", "is_start_overdue"]

UNJUDGED: Final = frozenset({Reason.NOT_RUNNING, Reason.NOT_STARTED, Reason.UNREADABLE_SPEC})
"""Reasons of earlier conditions that do not apply to the running attempt."""

_update: Final = partial(ConditionUpdate, ConditionType.PROGRESSING)
_START_TIMEOUT_S: Final = 300
"""Seconds that pods may take to start without a warning."""

_TIMEOUT_S: Final = 3600
"""Seconds that pods have for their next step or commit after another pod has exited 0. Without one, it is also the time
after which a training that reports no hang isn't said to advance."""

_MAX_NAMED: Final = 3
"""The number of pods that a message names."""


def derive_progressing(
    view: View,
    history: JobHistory,
    progress: ProgressStatus | None,
    *,
    obstacle: str | None,
    received: bool | None,
) -> tuple[tuple[ConditionUpdate, ...], float | None]:
    """Check whether the running attempt makes steps or commits, and return the seconds until the next check.

    Return no condition to keep the present one. `obstacle`: what keeps pods from running; None if all pods run or have
    exited 0. `received`: reports arrive; None if that is unknown.
    """
    attempt = history.last_attempt
    if obstacle is not None or attempt is None:
        return _judge_start(view, history, obstacle or "")
    if (hang := find_hang(view, history)) is not None:
        return (_update(Reason.STALLED, explain_hang(view, history, hang), status=False),), None
    last = find_current_report(view.observed, history)
    report = last if received else None
    n_done, done = find_done(view, history)
    n_hosts = view.n_hosts
    left_s = None
    # The first report to an operator that has just started shows whether steps were made before.
    is_due = n_done > 0 or (report is not None and not _has_made_all_steps(view.job, report))
    if received is not None and n_done < n_hosts and is_due:
        signs = [attempt.start, *(pod.finished_at or 0.0 for pod in done), *_list_signs(last)]
        left_s = max(*signs, *_list_recorded_signs(view, progress)) + _TIMEOUT_S - view.now
        if left_s <= 0 and n_done:
            message = f"{_describe_done(n_hosts, n_done, done)}{_describe_stall(last, progress)}. {_advise(view.job)}"
            return (_update(Reason.PARTIALLY_FINISHED, message, status=False),), None
    conditions = view.job.status.conditions if history.is_attempt_of(view.job.status) else ()
    before = find_condition(conditions, ConditionType.PROGRESSING)
    # A restarted operator that has no report yet keeps the condition that the last one set.
    keeps = received is None and before is not None and before.reason not in UNJUDGED
    # If all pods are done, no step can follow.
    if keeps or (n_done != n_hosts and _is_still_stalled(view.job, before, last, n_done)):
        return (), left_s
    return (_judge_by_reports(view.job, report, moves=left_s is None or left_s > 0),), left_s


def is_stalled(status: TrainingJobStatus) -> bool:
    """Return True while the training is known to make no steps, although its pods run."""
    condition = find_condition(status.conditions, ConditionType.PROGRESSING)
    is_false = condition is not None and condition.status is ConditionStatus.FALSE
    return is_false and not is_start_overdue(status)


def is_start_overdue(status: TrainingJobStatus) -> bool:
    """Return True while pods are known not to have started for long."""
    condition = find_condition(status.conditions, ConditionType.PROGRESSING)
    return condition is not None and condition.reason == Reason.NOT_STARTED


def _judge_start(
    view: View, history: JobHistory, obstacle: str
) -> tuple[tuple[ConditionUpdate, ...], float | None]:
    """Judge an attempt of which not all pods run: its pods may have failed to start for too long."""
    since = find_unstarted_since(view, history)
    left_s = None if since is None else since + _START_TIMEOUT_S - view.now
    if left_s is None or left_s > 0:
        return (_update(Reason.NOT_RUNNING, "not all pods of an attempt run", status=None),), left_s
    meta = view.job.metadata
    describe = f"kubectl -n {meta.namespace} describe pods -l {JOB_NAME_LABEL}={meta.name}"
    text = (
        f"not all pods have started for {_START_TIMEOUT_S} s: {obstacle}. See their events ({describe}). "
        "spec.startDeadlineSeconds suspends such a job"
    )
    return (_update(Reason.NOT_STARTED, text, status=False),), None


def _has_made_all_steps(job: CheckpointedTrainingJob, report: LastReport) -> bool:
    step, total = report.report.step, job.spec.total_steps
    reached = step is not None and total is not None and step >= total
    return reached or report.report.phase is ReportPhase.DONE


def _list_signs(report: LastReport | None) -> list[float]:
    times = () if report is None else (report.moved_at, report.committed_at)
    return [0.0, *(time for time in times if time is not None)]


def _list_recorded_signs(view: View, progress: ProgressStatus | None) -> list[float]:
    """List the times of the last step and commit in the status."""
    checkpoint = view.job.status.checkpoint
    latest = None if checkpoint is None else checkpoint.latest
    times = (
        None if progress is None else progress.last_progress_time,
        None if latest is None else latest.time,
    )
    return [0.0, *(min(time, view.now) for time in times if time is not None)]


def _is_still_stalled(
    job: CheckpointedTrainingJob,
    before: Condition | None,
    last: LastReport | None,
    n_done: int,
) -> bool:
    """Return True if condition `before` reports a stall, and the training has made no step or commit since."""
    if before is None or before.status is not ConditionStatus.FALSE or before.reason in UNJUDGED:
        return False
    if before.reason == Reason.STALLED:
        return last is None  # each report says whether the training hangs
    if not n_done:
        return False  # the Job of the pod that was done was created again: all pods run
    if last is None:
        return True
    if _has_made_all_steps(job, last):
        return False
    # The first report to a new operator shows no change of the step: compare its step with the status.
    progress = job.status.progress
    advanced = has_advanced(last.report.step, None if progress is None else progress.step)
    return not advanced and max(_list_signs(last)) <= before.last_transition_time


def _judge_by_reports(
    job: CheckpointedTrainingJob, report: LastReport | None, *, moves: bool
) -> ConditionUpdate:
    if report is None:
        return _update(Reason.NO_REPORTS, "no reports arrive: see condition Reporting", status=None)
    if _has_made_all_steps(job, report):
        return _update(Reason.ALL_STEPS_MADE, "", status=True)
    if report.report.step is None:
        return _update(Reason.NO_STEP_YET, "no step was reported yet", status=None)
    if not moves:
        text = f"no step or commit was reported for {_TIMEOUT_S} s, but no hang either"
        return _update(Reason.NO_STEP_YET, text, status=None)
    return _update(Reason.STEPS_ADVANCE, "", status=True)


def _describe_done(n_hosts: int, n_done: int, done: list[Pod]) -> str:
    names = ", ".join(pod.name for pod in done[:_MAX_NAMED])
    more = ", …" if len(done) > _MAX_NAMED else ""
    named = f" ({names}{more})" if names else ""
    return f"{n_done} of {n_hosts} pods have exited 0{named}, and the others are still running; "


def _describe_stall(last: LastReport | None, progress: ProgressStatus | None) -> str:
    """Describe the last step and its time. The text stays the same during a stall."""
    text = f"no step or commit was reported for {_TIMEOUT_S} s"
    if last is None or progress is None or progress.last_progress_time is None:
        return text
    return f"{text}: the last is step {progress.step} at {render_time(progress.last_progress_time)}"


def _advise(job: CheckpointedTrainingJob) -> str:
    kubectl = f"kubectl -n {job.metadata.namespace}"
    return (
        "No pod is stopped, since a long export looks the same. To find where the training is, see the pods' logs "
        f"({kubectl} logs POD -c trainer), or use py-spy dump in a pod. If the training hangs, start all pods "
        f"again from the latest commit: {restart_command(job)}"
    )
