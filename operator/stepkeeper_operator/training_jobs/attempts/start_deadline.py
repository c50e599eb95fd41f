"""Find for how long the pods of the running attempt have not all started, and whether the job is held for it.

A held job is suspended until a user changes its spec or its restart annotation. Its condition Suspended remembers that.
"""

from stepkeeper_operator.api.v1alpha1.conditions import (
    Condition,
    ConditionStatus,
    ConditionType,
    find_condition,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.training_jobs.attempts.attempt_pods import find_done
from stepkeeper_operator.training_jobs.attempts.ends import was_edited
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.build.objects import restart_command
from stepkeeper_operator.training_jobs.observed import View

__all__ = ["compute_deadline_s", "explain_hold", "find_hold", "find_unstarted_since", "is_held"]


def find_unstarted_since(view: View, history: JobHistory) -> float | None:
    """Find the Unix time since which pods that have to start have not; None if all have, or none has to.

    It counts since the attempt's start, since its JobSet was resumed, and since all pods last ran, whichever is latest.
    """
    last, jobset = history.last_attempt, view.jobset
    if last is None or last.end is not None or jobset is None or jobset.suspend or jobset.suspended:
        return None
    present = [pod for pod in view.observed.pods if pod.ordinal == history.ordinal]
    if any(pod.deletion_requested_at is not None for pod in present):
        return None  # the attempt is about to end, or gets another pod
    n_done, done = find_done(view, history)
    started = {pod.rank for pod in (*present, *done) if pod.started}
    if len(started) + max(0, n_done - len(done)) >= view.n_hosts:
        return None
    running = find_condition(view.job.status.conditions, ConditionType.RUNNING)
    all_ran_at = 0.0
    if running is not None:
        all_ran_at = view.now if running.status is ConditionStatus.TRUE else running.last_transition_time
    return max(last.start, jobset.resumed_at or 0.0, all_ran_at)


def compute_deadline_s(view: View, history: JobHistory) -> float | None:
    """Compute the seconds until the pods have to have started: 0 or less once it is too late, None without a limit."""
    limit_s, since = view.job.spec.start_deadline_seconds, find_unstarted_since(view, history)
    return None if limit_s is None or since is None else since + limit_s - view.now


def find_hold(view: View) -> Condition | None:
    """Return condition Suspended if it holds the job because of its deadline, and no user has released it since."""
    held = find_condition(view.job.status.conditions, ConditionType.SUSPENDED)
    if held is None or held.reason != Reason.START_DEADLINE_EXCEEDED:
        return None
    job = view.job
    changed = view.observed.accepted and job.status.observed_generation != job.metadata.generation
    return None if changed or was_edited(view, job.status.operator) else held


def is_held(view: View, history: JobHistory) -> bool:
    """Return True if the job has to stop, or stay stopped, because its pods did not start in time."""
    left_s = compute_deadline_s(view, history)
    return find_hold(view) is not None or (left_s is not None and left_s <= 0)


def explain_hold(view: View, *, obstacle: str) -> str:
    """Explain why the job is held, and what starts it again. `obstacle` says what its pods wait for now."""
    if (held := find_hold(view)) is not None:
        return held.message  # its pods are gone since
    limit_s = view.job.spec.start_deadline_seconds
    return (
        f"not all pods started within spec.startDeadlineSeconds ({limit_s} s): {obstacle}. "
        f"Fix the cause. The job starts again after a change of its spec, or by: {restart_command(view.job)}"
    )
