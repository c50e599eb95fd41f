"""Bound and space the starts of a job: those that come to nothing, and those that a queue decides on."""

from dataclasses import replace
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.conditions import ConditionType
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Bookkeeping
from stepkeeper_operator.build import template_hash
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempts import was_asked_for
from stepkeeper_operator.policy.budgets import compute_backoff_s, count_failures
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.machines import explain_loss, find_wait

__all__ = [
    "NOT_QUEUED",
    "NO_WORKLOAD",
    "compute_next_start",
    "compute_report_wait_s",
    "explain_limit",
    "has_left_queue",
    "is_limit_reached",
    "leaves_queue",
    "note_limit",
    "set_starts",
    "should_suspend",
    "was_edited",
]

_REPORT_WAIT_S: Final = 60
"""Seconds left to the pods to report to an operator that has just started."""

NOT_QUEUED: Final = "NotQueued"
"""Reason of condition QuotaReserved of a job that has left Kueue's queues."""

NO_WORKLOAD: Final = "NoWorkload"
"""Its reason for a JobSet that somebody queues whose Workload isn't known."""


def set_starts(history: JobHistory, n_starts: int) -> JobHistory:
    """Set how many starts in a row have committed no checkpoint."""
    noted = history.bookkeeping.model_copy(update={"starts_without_checkpoint": n_starts})
    return replace(history, bookkeeping=noted)


def note_limit(job: CheckpointedTrainingJob, history: JobHistory) -> JobHistory:
    """Note how many starts are allowed as the newest begins: a limit that is lowered later ends nothing that runs."""
    if not history.is_running or history.is_attempt_of(job.status):
        return history
    noted = {"starts_allowed": job.spec.restarts.max_starts_without_checkpoint}
    return replace(history, bookkeeping=history.bookkeeping.model_copy(update=noted))


def was_edited(job: CheckpointedTrainingJob, observed: Observed, bookkeeping: Bookkeeping) -> bool:
    """Return True if template or placement have changed since the newest start.

    Without the machines that a job names that can't be known yet, nor while the spec hides changes. What isn't accepted
    mends nothing.
    """
    if bookkeeping.started_template is None or observed.held or job.spec.hides_changes():
        return False
    if job.spec.placement.queued_resource_name is not None and observed.machines is None:
        return False
    return bookkeeping.started_template != template_hash(job, observed.machines)


def is_limit_reached(
    job: CheckpointedTrainingJob, observed: Observed, history: JobHistory, *, now: float
) -> bool:
    """Return True if no further start is allowed before a person has looked at the job.

    The last start that is allowed may run, and so may what might have committed while no operator watched.
    """
    n_left = _count_starts_left(job, history)
    if not history.is_running:
        return n_left <= 0
    return n_left < 0 and compute_report_wait_s(job, observed, history, now=now) is None


def _count_starts_left(job: CheckpointedTrainingJob, history: JobHistory) -> int:
    known, allowed = history.bookkeeping, job.spec.restarts.max_starts_without_checkpoint
    if history.is_running:
        allowed = max(allowed, known.starts_allowed or 0)
    return allowed - known.starts_without_checkpoint


def compute_report_wait_s(
    job: CheckpointedTrainingJob, observed: Observed, history: JobHistory, *, now: float
) -> float | None:
    """Compute for how many seconds a new operator lets more starts run than are allowed, until it hears of commits.

    Returns:
        The seconds; None if nothing is waited for: no such start runs, or it is already being stopped, or a report
        has named the root, or it has had its time.

    """
    jobset, last = observed.jobset, observed.report
    if jobset is None or jobset.suspend or not history.is_running or _count_starts_left(job, history) >= 0:
        return None
    if last is not None and last.ordinal == history.ordinal and last.report.root is not None:
        return None
    left_s = observed.operator_started_at + _REPORT_WAIT_S - now
    return left_s if left_s > 0 else None


def explain_limit(job: CheckpointedTrainingJob, history: JobHistory) -> str:
    """Explain to a person why the job was suspended, and how it goes on."""
    n_starts = history.bookkeeping.starts_without_checkpoint
    which = "1 start has" if n_starts == 1 else f"{n_starts} starts in a row have"
    ended = next((attempt for attempt in reversed(history.attempts) if attempt.end is not None), None)
    last = "" if ended is None else f" The last ended by {ended.cause}: {ended.message}."
    return (
        f"{which} committed no new checkpoint; "
        f"spec.restarts.maxStartsWithoutCheckpoint allows {job.spec.restarts.max_starts_without_checkpoint}.{last} "
        "Mend the cause. A changed spec.template starts the job again; so does spec.suspend set to true and back to "
        "false, or a greater maxStartsWithoutCheckpoint"
    )


def compute_next_start(job: CheckpointedTrainingJob, observed: Observed, history: JobHistory) -> float | None:
    """Compute the earliest time of the next start. None: at once.

    After a failure of the application it is counted from the failure, and so it is while storage is away, for which
    an attempt has waited for long already. After all other ends it is counted from the
    start: only starts that come to nothing at once, again and again, have to wait. An end that somebody asked for
    makes nobody wait, and what was edited may be mended.
    """
    last, spec = history.last_attempt, job.spec.restarts.backoff
    if last is None or last.end is None or not last.cause or was_asked_for(last.message):
        return None
    if was_edited(job, observed, history.bookkeeping):
        return None
    if last.cause == Cause.APPLICATION_ERROR:
        wait_s = compute_backoff_s(spec, count_failures(history.restarts))
        return last.end + wait_s if wait_s else None
    n_starts = history.bookkeeping.starts_without_checkpoint
    if last.cause == Cause.STORAGE_UNAVAILABLE:
        wait_s = compute_backoff_s(spec, max(0, n_starts - 1))
        return last.end + wait_s if wait_s else None
    due = last.start + compute_backoff_s(spec, n_starts - 2) if n_starts > 1 else 0
    return due if due > last.end else None


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
