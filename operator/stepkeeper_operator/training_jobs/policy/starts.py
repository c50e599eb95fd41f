"""Limit and space the starts of a job, and decide when it leaves its queue.

The limit is maxStartsWithoutCheckpoint: how many starts in a row may commit no checkpoint.
"""

from typing import Final

from stepkeeper.contract import STOPPED_KINDS
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.training_jobs.attempts.budgets import count_failures, limits_of
from stepkeeper_operator.training_jobs.attempts.ends import was_edited
from stepkeeper_operator.training_jobs.attempts.history import JobHistory, describe_end
from stepkeeper_operator.training_jobs.observed import View
from stepkeeper_operator.training_jobs.policy.machines import find_wait

__all__ = [
    "compute_next_start",
    "compute_report_wait_s",
    "explain_limit",
    "is_limit_reached",
    "leaves_queue",
    "should_suspend",
]

_REPORT_WAIT_S: Final = 60
"""Seconds that the pods have to report to an operator that has just started."""


def is_limit_reached(view: View, history: JobHistory) -> bool:
    """Return True if no further start is allowed until a user changes the job."""
    n_left = _count_starts_left(view.job, history)
    if not history.is_running:
        return n_left <= 0
    # The running start is counted: at 0 it is the last allowed one.
    return n_left < 0 and compute_report_wait_s(view, history) is None


def _count_starts_left(job: CheckpointedTrainingJob, history: JobHistory) -> int:
    allowed = job.spec.restarts.max_starts_without_checkpoint
    if history.is_running:  # a lower limit since its beginning does not stop it
        allowed = max(allowed, history.operator.starts_allowed or 0)
    return allowed - history.operator.starts_without_checkpoint


def compute_report_wait_s(view: View, history: JobHistory) -> float | None:
    """Compute for how many seconds a new operator lets a start beyond the limit run.

    Its pods may have committed without an operator, and need the time to report that. Return None if no such start
    runs, it is being stopped, a report has named its root, or the time has passed.
    """
    jobset, last = view.jobset, view.observed.report
    if jobset is None or jobset.suspend or not history.is_running:
        return None
    if _count_starts_left(view.job, history) >= 0:
        return None
    if last is not None and last.ordinal == history.ordinal and last.report.root is not None:
        return None
    left_s = view.observed.operator_started_at + _REPORT_WAIT_S - view.now
    return left_s if left_s > 0 else None


def explain_limit(job: CheckpointedTrainingJob, history: JobHistory) -> str:
    """Explain why the job was suspended, and how to start it again."""
    n_starts, allowed = (
        history.operator.starts_without_checkpoint,
        job.spec.restarts.max_starts_without_checkpoint,
    )
    starts = "1 start has" if n_starts == 1 else f"{n_starts} starts in a row have"
    ended = history.closed[-1] if history.closed else None
    last = "" if ended is None else f" The last ended by {ended.cause}: {describe_end(ended)}."
    return (
        f"{starts} committed no new checkpoint; spec.restarts.maxStartsWithoutCheckpoint allows {allowed}.{last} "
        "Fix the cause. To start the job again, change spec.template, set spec.suspend to true and back to false, or "
        "raise maxStartsWithoutCheckpoint"
    )


def compute_next_start(view: View, history: JobHistory) -> float | None:
    """Compute the earliest time of the next start; None for now.

    There is no wait after a requested end, nor after an edit, which may have fixed the cause.
    """
    last = history.last_attempt
    if last is None or last.end is None or not last.cause or last.kind in STOPPED_KINDS:
        return None
    if was_edited(view, history.operator):
        return None
    return limits_of(view.job.spec.restarts).compute_next_start(
        last.cause,
        start=last.start,
        end=last.end,
        n_failures=count_failures(history.restarts),
        n_starts=history.operator.starts_without_checkpoint,
    )


def should_suspend(view: View, history: JobHistory) -> bool:
    """Return True if the user suspends the job, or too many starts in a row ended without a commit."""
    return view.job.spec.suspend or is_limit_reached(view, history)


def leaves_queue(view: View, history: JobHistory) -> bool:
    """Return True if the JobSet of a queued job has to be deleted for the job to stop.

    Kueue would at once resume an admitted JobSet that the operator suspended. Without its JobSet the job uses no quota,
    and a new JobSet joins the queue once the job may start. Hosts that left for a moment do not cost it its place.
    """
    wait = find_wait(view)
    return view.observed.is_queued and (should_suspend(view, history) or (wait is not None and wait.stop))
