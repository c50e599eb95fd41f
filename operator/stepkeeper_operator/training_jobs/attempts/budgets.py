"""Count the restarts of a job by cause, as in its status, and check whether one is left.

Restarts after application failures count towards maxFailures, and those after disruptions towards maxDisruptions.
"""

from stepkeeper.contract import Cause, RestartLimits, is_disruption
from stepkeeper_operator.api.v1alpha1.trainingjob import RestartsSpec
from stepkeeper_operator.api.v1alpha1.trainingjob_status import CauseCount, RestartsStatus

__all__ = [
    "add_restarts",
    "count_disruptions",
    "count_failures",
    "explain_exhausted_budget",
    "limits_of",
    "reset_failures",
]


def limits_of(spec: RestartsSpec) -> RestartLimits:
    """Convert the limits of the spec for the rules."""
    return RestartLimits(
        max_failures=spec.max_failures,
        max_disruptions=spec.max_disruptions,
        initial_wait_s=spec.backoff.initial_seconds,
        max_wait_s=spec.backoff.max_seconds,
    )


def count_failures(restarts: RestartsStatus) -> int:
    """Count the restarts after application failures since the last commit that reset their count."""
    failures = [entry for entry in restarts.by_cause if entry.cause == Cause.APPLICATION_ERROR]
    return sum(entry.counted_towards_limit for entry in failures)


def reset_failures(restarts: RestartsStatus) -> RestartsStatus:
    """Set the count of failures to 0, after a new commit."""
    return _count_towards_limit(restarts, {Cause.APPLICATION_ERROR.value: 0})


def count_disruptions(spec: RestartsSpec, restarts: RestartsStatus) -> RestartsStatus:
    """Set in the status how many disruptions count towards their limit: all, or none if there is no limit."""
    limited = spec.max_disruptions is not None
    disruptions = [entry for entry in restarts.by_cause if is_disruption(entry.cause)]
    return _count_towards_limit(restarts, {each.cause: each.count if limited else 0 for each in disruptions})


def explain_exhausted_budget(
    spec: RestartsSpec, restarts: RestartsStatus, cause: str, *, restarted: bool
) -> str | None:
    """Explain why no restart is left for an attempt that ended by `cause`; None if one is left.

    `restarted` means that JobSet has already restarted it and that `restarts` includes this restart.
    """
    included = 1 if restarted else 0
    n_disruptions = sum(map(_count_as_disruptions, restarts.by_cause)) - included
    n_failures = count_failures(restarts) - included
    # This compares only the count of the kind of `cause`.
    if not limits_of(spec).is_used_up(cause, n_failures=n_failures, n_disruptions=n_disruptions):
        return None
    if cause == Cause.APPLICATION_ERROR:
        return (
            f"{spec.max_failures} restarts after application failures are allowed without a new checkpoint "
            "(spec.restarts.maxFailures), and the application failed again"
        )
    return f"{spec.max_disruptions} restarts after disruptions are allowed (spec.restarts.maxDisruptions)"


def _count_as_disruptions(entry: CauseCount) -> int:
    """Count restarts as disruptions. Of an unknown cause, only a newer operator knew how many count."""
    if entry.cause not in set(Cause):
        return entry.counted_towards_limit
    return entry.count if is_disruption(entry.cause) else 0


def add_restarts(restarts: RestartsStatus, cause: str, difference: int) -> RestartsStatus:
    """Change the number of restarts for `cause` by `difference`, negative to withdraw restarts that never ran."""
    counts = {entry.cause: entry for entry in restarts.by_cause}
    entry = counts.get(cause, CauseCount(cause=cause, count=0))
    counted = difference if cause == Cause.APPLICATION_ERROR else 0
    # Not below 0: a commit may have reset the count of a restart that is withdrawn now.
    counts[cause] = CauseCount(
        cause=cause,
        count=max(0, entry.count + difference),
        counted_towards_limit=max(0, entry.counted_towards_limit + counted),
    )
    by_cause = tuple(counts[name] for name in sorted(counts) if counts[name].count > 0)
    return RestartsStatus(total=max(0, restarts.total + difference), by_cause=by_cause)


def _count_towards_limit(restarts: RestartsStatus, counts: dict[str, int]) -> RestartsStatus:
    entries = [(each, counts.get(each.cause, each.counted_towards_limit)) for each in restarts.by_cause]
    by_cause = tuple(each.model_copy(update={"counted_towards_limit": n}) for each, n in entries)
    return restarts.model_copy(update={"by_cause": by_cause})
