"""Find pods that outlived their Job and that nobody else would delete."""

from typing import Final

from stepkeeper_operator.decision import DeletePod
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.history import JobHistory

__all__ = ["ORPHAN_WAIT_S", "find_orphans"]

ORPHAN_WAIT_S: Final = 60
"""Seconds left to the garbage collector, which deletes such pods within seconds if it sees them."""


def find_orphans(
    observed: Observed, history: JobHistory, *, now: float
) -> tuple[tuple[DeletePod, ...], float | None]:
    """Find the pods to delete, and the seconds after which to look again.

    A garbage collector whose watches were broken while a JobSet was deleted can lose sight of its pods. They
    run on with an owner that doesn't exist, and no next attempt can start beside them.
    """
    orphans = () if observed.leftover is None else observed.leftover.orphans
    last = history.last_attempt
    if not orphans or last is None or last.end is None:
        return (), None
    left_s = last.end + ORPHAN_WAIT_S - now
    return ((), left_s) if left_s > 0 else (tuple(DeletePod(pod=pod) for pod in orphans), None)
