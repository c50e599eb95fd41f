"""Define the part of a decision that is about the JobSet, and what its next start waits for."""

from dataclasses import dataclass, replace
from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt, JobSetRef
from stepkeeper_operator.facts import JobSet
from stepkeeper_operator.training_jobs.attempts.attempt_pods import find_pods
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.decision import Action, DeleteJobSet, JobEnd, SetSuspend
from stepkeeper_operator.training_jobs.observed import JOBSET_RECHECK_S, REJECTED_AGAIN_S, View
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

_HELD: Final = "the job is not accepted: condition Accepted says why"
_REFUSED: Final = "the API server refuses its JobSet: condition Accepted says why"
BACKING_OFF: Final = "it waits until status.nextStartTime (spec.restarts.backoff)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The part of a decision that is about the JobSet."""

    history: JobHistory
    job_set: JobSetRef | None
    """Value for status.resources."""

    actions: tuple[Action, ...] = ()
    end: JobEnd | None = None
    waiting: str | None = None
    """The reason why a job without a running attempt waits, for people."""

    look_again_s: float | None = None


def stop_jobset(jobset: JobSet | None, *, queued: bool) -> tuple[Action, ...]:
    """Stop all pods after the job's end. The pods of a JobSet that ended by itself are kept for their logs.

    One that Kueue manages is not suspended first: Kueue would resume it.
    """
    if jobset is None or jobset.is_finished or jobset.deleting:
        return ()
    return (DeleteJobSet(jobset=jobset),) if jobset.suspended or queued else set_suspend(jobset, suspend=True)


def set_suspend(jobset: JobSet, *, suspend: bool) -> tuple[Action, ...]:
    """Suspend or resume the JobSet, if it is not so already."""
    return () if jobset.suspend == suspend else (SetSuspend(jobset=jobset, suspend=suspend),)


def find_delay(view: View, history: JobHistory, *, wait_s: float) -> tuple[str, float | None] | None:
    """Find what the next JobSet waits for. Also return in how many seconds to look again."""
    observed = view.observed
    if observed.held or should_suspend(view, history):
        return _HELD if observed.held else "it is suspended", None
    if wait := find_wait(view):
        return wait.message, None
    if wait_s > 0:
        return BACKING_OFF, wait_s
    if (refusal := observed.rejection) is not None and view.now < refusal.at + REJECTED_AGAIN_S:
        return _REFUSED, refusal.at + REJECTED_AGAIN_S - view.now
    if (leftover := observed.leftover) is not None:
        # Two sets of pods at once would fight for the storage, and two Jobs can't have one name.
        text = f"{leftover.name} of {leftover.origin} is still there: it has to end, or to be deleted"
        return text, JOBSET_RECHECK_S
    return None


def set_backoff(view: View, history: JobHistory) -> tuple[JobHistory, float]:
    """Set the time of the next start in the history. Also return the seconds until then."""
    at = compute_next_start(view, history)
    wait_s = 0.0 if at is None else max(0.0, at - view.now)
    return replace(history, next_start_time=None if at is None else int(at)), wait_s


def hold_next_start(view: View, plan: Plan) -> Plan:
    """Hold up the restart that JobSet is about to do, if the job's starts end at once.

    JobSet restarts in place without any wait, and without any limit unless it counts a failure: those are few.
    """
    last = plan.history.last_attempt
    if last is None or _counts_towards_max(view, plan.history, last):
        return plan
    history, wait_s = set_backoff(view, plan.history)
    plan = replace(plan, history=history)
    return replace(plan, waiting=BACKING_OFF, look_again_s=wait_s) if wait_s > 0 else plan


def _counts_towards_max(view: View, history: JobHistory, last: Attempt) -> bool:
    """Return True if JobSet has counted the restart after the last attempt, or will.

    It may not have counted what is charged to the application: a pod that saved because its peer failed hides that.
    """
    jobset, known = view.jobset, history.operator
    if last.cause != Cause.APPLICATION_ERROR:
        return False
    if jobset is not None and jobset.restarts > known.restarts_seen:
        return jobset.restarts_counted > known.counted_restarts_seen
    return find_pods(history, view.observed).count_as_failure() is not False
