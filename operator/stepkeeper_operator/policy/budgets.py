"""Count how many restarts are left, by cause, and compute the wait before the next."""

from typing import Final

from stepkeeper.contract import Cause
from stepkeeper_operator.api.v1alpha1.trainingjob import BackoffSpec, RestartsSpec
from stepkeeper_operator.api.v1alpha1.trainingjob_status import CauseCount, RestartsStatus
from stepkeeper_operator.policy.history import CAUSE_DISRUPTION

__all__ = [
    "add_restarts",
    "compute_backoff_s",
    "count_disruptions",
    "count_failures",
    "explain_exhausted_budget",
    "move_restart",
    "reset_failures",
]

_DISRUPTIONS: Final = frozenset(
    {
        Cause.SPOT_PREEMPTION.value,
        Cause.QUEUE_PREEMPTION.value,
        Cause.SCHEDULER_PREEMPTION.value,
        Cause.MAINTENANCE.value,
        Cause.NODE_FAILURE.value,
        Cause.EVICTION.value,
        CAUSE_DISRUPTION,
    }
)


def count_failures(restarts: RestartsStatus) -> int:
    """Count the restarts after application failures that count towards maxFailures now."""
    return sum(
        entry.counted_towards_limit for entry in restarts.by_cause if entry.cause == Cause.APPLICATION_ERROR
    )


def move_restart(restarts: RestartsStatus, *, source: str, target: str) -> RestartsStatus:
    """Move one restart to another cause than it was counted for."""
    if source == target:
        return restarts
    return add_restarts(add_restarts(restarts, source, -1), target, 1)


def reset_failures(restarts: RestartsStatus) -> RestartsStatus:
    """Set the count of failures to 0, after a new commit."""
    if count_failures(restarts) == 0:
        return restarts
    by_cause = tuple(
        entry.model_copy(update={"counted_towards_limit": 0})
        if entry.cause == Cause.APPLICATION_ERROR
        else entry
        for entry in restarts.by_cause
    )
    return restarts.model_copy(update={"by_cause": by_cause})


def count_disruptions(spec: RestartsSpec, restarts: RestartsStatus) -> RestartsStatus:
    """Set how many disruptions count towards their limit: all of them, or none where the job has no limit.

    A count without a limit would be taken for used-up failures.
    """
    limited = spec.max_disruptions is not None
    by_cause = tuple(
        entry.model_copy(update={"counted_towards_limit": entry.count if limited else 0})
        if entry.cause in _DISRUPTIONS
        else entry
        for entry in restarts.by_cause
    )
    return restarts.model_copy(update={"by_cause": by_cause})


def explain_exhausted_budget(
    spec: RestartsSpec, restarts: RestartsStatus, cause: str, *, restarted: bool
) -> str | None:
    """Explain why no restart is left for an attempt that ended for `cause`. Return None if there is one.

    `restarted` says that JobSet has already restarted it and that `restarts` includes this restart.
    """
    taken = 1 if restarted else 0
    if cause == Cause.APPLICATION_ERROR and count_failures(restarts) - taken >= spec.max_failures:
        return (
            f"{spec.max_failures} restarts after failures of the application are allowed without a new checkpoint "
            "(spec.restarts.maxFailures), and it failed again"
        )
    if spec.max_disruptions is not None and cause in _DISRUPTIONS:
        disruptions = sum(entry.count for entry in restarts.by_cause if entry.cause in _DISRUPTIONS)
        if disruptions - taken >= spec.max_disruptions:
            return f"{spec.max_disruptions} restarts after disruptions are allowed (spec.restarts.maxDisruptions)"
    return None


def compute_backoff_s(spec: BackoffSpec, doublings: int) -> int:
    """Compute the seconds of a back-off that has been doubled so often."""
    return int(min(spec.max_seconds, spec.initial_seconds * 2 ** min(doublings, 32)))


def add_restarts(restarts: RestartsStatus, cause: str, difference: int) -> RestartsStatus:
    """Count so many restarts more for that cause; fewer where they came to nothing."""
    counts = {entry.cause: entry for entry in restarts.by_cause}
    entry = counts.get(cause, CauseCount(cause=cause, count=0))
    counted = difference if cause == Cause.APPLICATION_ERROR else 0
    counts[cause] = entry.model_copy(
        update={
            "count": max(0, entry.count + difference),
            "counted_towards_limit": max(0, entry.counted_towards_limit + counted),
        }
    )
    by_cause = tuple(counts[name] for name in sorted(counts) if counts[name].count > 0)
    return RestartsStatus(total=max(0, restarts.total + difference), by_cause=by_cause)
