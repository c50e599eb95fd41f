"""Define the plan for the JobSet, and find what its next start waits for."""

from dataclasses import dataclass, replace
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt, JobSetRef
from stepkeeper_operator.facts.jobset import JobSet
from stepkeeper_operator.training_jobs.attempts.attempt_pods import find_pods
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.decision import Action, DeleteJobSet, JobEnd, SetSuspend
from stepkeeper_operator.training_jobs.observed import JOBSET_RECHECK_S, REJECTION_RETRY_S, View
from stepkeeper_operator.training_jobs.policy.machines import find_wait
from stepkeeper_operator.training_jobs.policy.starts import compute_next_start, should_suspend

__all__ = [
    "BACKING_OFF",
    "Plan",
    "find_delay",
    "hold_next_start",
    "set_backoff",
    "set_suspend",
    "stop_jobset",
]

_NOT_ACCEPTED: Final = "the job is not accepted: see condition Accepted"
_REFUSED: Final = "the API server refuses its JobSet: see condition Accepted"
BACKING_OFF: Final = "waiting until status.nextStartTime (spec.restarts.backoff)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The part of a decision that concerns the JobSet."""

    history: JobHistory
    job_set: JobSetRef | None
    """Value for status.resources."""

    actions: tuple[Action, ...] = ()
    end: JobEnd | None = None
    waiting: str | None = None
    """The reason why a job without a running attempt waits, for messages."""

    look_again_s: float | None = None


def stop_jobset(jobset: JobSet | None, *, queued: bool) -> tuple[Action, ...]:
    """Stop all pods after the job's end, unless the JobSet ended by itself. Kueue would resume a suspended one."""
    if jobset is None or jobset.is_finished or jobset.deleting:
        return ()
    return (DeleteJobSet(jobset=jobset),) if jobset.suspended or queued else set_suspend(jobset, suspend=True)


def set_suspend(jobset: JobSet, *, suspend: bool) -> tuple[Action, ...]:
    """Suspend or resume the JobSet, unless it already is in that state."""
    return () if jobset.suspend == suspend else (SetSuspend(jobset=jobset, suspend=suspend),)


def find_delay(view: View, history: JobHistory, *, wait_s: float) -> tuple[str, float | None] | None:
    """Find what the next JobSet waits for, and after how many seconds to look again."""
    observed = view.observed
    if not observed.may_start or should_suspend(view, history):
        return "the job is suspended" if observed.may_start else _NOT_ACCEPTED, None
    if wait := find_wait(view):
        return wait.message, None
    if wait_s > 0:
        return BACKING_OFF, wait_s
    if (refusal := observed.rejection) is not None and view.now < refusal.at + REJECTION_RETRY_S:
        return _REFUSED, refusal.at + REJECTION_RETRY_S - view.now
    if (leftover := observed.leftover) is not None:
        # Two sets of pods would compete for the storage, and two Jobs cannot share a name.
        text = f"{leftover.origin} left {leftover.name}: wait until it is gone, or delete it"
        return text, JOBSET_RECHECK_S
    return None


def set_backoff(view: View, history: JobHistory) -> tuple[JobHistory, float]:
    """Set the time of the next start in the history, and return the seconds until then."""
    at = compute_next_start(view, history)
    wait_s = 0.0 if at is None else max(0.0, at - view.now)
    return replace(history, next_start_time=None if at is None else int(at)), wait_s


def hold_next_start(view: View, plan: Plan) -> Plan:
    """Delay the restart that JobSet is about to do by the job's back-off, unless JobSet limits such restarts.

    JobSet restarts in place without a wait, and limits only the restarts that it counts as failures.
    """
    last = plan.history.last_attempt
    if last is None or _counts_towards_max(view, plan.history, last):
        return plan
    history, wait_s = set_backoff(view, plan.history)
    plan = replace(plan, history=history)
    return replace(plan, waiting=BACKING_OFF, look_again_s=wait_s) if wait_s > 0 else plan


def _counts_towards_max(view: View, history: JobHistory, last: Attempt) -> bool:
    """Return True if JobSet counts the restart as a failure.

    It does not count every failure: a pod that saved because its peer failed can hide it.
    """
    jobset, seen = view.jobset, history.operator
    if last.cause != Cause.APPLICATION_ERROR:
        return False
    if jobset is not None and jobset.restarts > seen.restarts_seen:  # JobSet has begun the restart
        return jobset.restarts_counted > seen.counted_restarts_seen
    return find_pods(history, view.observed).count_as_failure() is not False
