"""Pods that outlived their Job, which nobody else would delete."""

from typing import Final

from stepkeeper_operator.decision import DeletePod
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.history import JobHistory

__all__ = ["ORPHAN_WAIT_S", "find_orphans"]

ORPHAN_WAIT_S: Final = 60
"""So long they are the garbage collector's, which deletes them within seconds as long as it sees them."""


def find_orphans(
    observed: Observed, history: JobHistory, *, now: float
) -> tuple[tuple[DeletePod, ...], float | None]:
    """The pods to delete, and when to look again.

    A garbage collector whose watches were broken while a JobSet was deleted can lose sight of its pods. They run on,
    with an owner that doesn't exist, and no next gang can start beside them.
    """
    orphans = () if observed.leftover is None else observed.leftover.orphans
    last = history.last_attempt
    if not orphans or last is None or last.end is None:
        return (), None
    left_s = last.end + ORPHAN_WAIT_S - now
    return ((), left_s) if left_s > 0 else (tuple(DeletePod(pod=pod) for pod in orphans), None)
