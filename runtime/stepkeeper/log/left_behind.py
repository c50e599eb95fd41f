"""Find what a branch has left behind, whose commits were all condemned. Pure but for the reading."""

from collections.abc import Callable

from stepkeeper.errors import DamagedEntryError
from stepkeeper.log.claims import Base
from stepkeeper.log.entries import BeginEntry, Entry
from stepkeeper.log.records import CommitRecord
from stepkeeper.log.state import LogState

__all__ = ["find_left_behind"]


def find_left_behind(state: LogState, read: Callable[[int], Entry]) -> Base:
    """Find what HEAD was before a branch began that has nothing live any more.

    The branch was begun by a process that didn't say what it goes on from, so nobody has chosen to leave that. A line
    that somebody has begun from scratch, or has gone back to, is another matter.

    Args:
        state: The log.
        read: Reads an entry.

    Returns:
        A live commit's slot, or another writer's step. None if HEAD isn't nothing, or was no such branch's, or what
        that had left behind isn't live any more.

    Raises:
        StorageError: The store gave no answer.

    """
    if state.head is not None or state.legacy is not None or not state.commits:
        return None
    lost = state.commits[max(state.commits)]
    try:
        while _is_last_of_line(lost):
            begun = _find_branch(lost.claim, read)
            if begun is None:
                return None
            if begun.after.head is None:
                return None if begun.index is None else begun.index.legacy
            left = state.commits.get(begun.after.head)
            if left is None or not _is_last_of_line(left):
                return None if left is None else _nearest_live(left)
            lost = left
    except DamagedEntryError:
        pass
    return None


def _is_last_of_line(record: CommitRecord) -> bool:
    """Tell whether the commit was condemned, and nothing below it is live."""
    return record.quarantined and record.parent is None and record.legacy is None


def _nearest_live(record: CommitRecord) -> Base:
    if not record.quarantined:
        return record.slot
    return record.legacy if record.parent is None else record.parent


def _find_branch(claim: int, read: Callable[[int], Entry]) -> Entry | None:
    """Find the begin of the branch that the commits of `claim` are on; None if their line began otherwise."""
    while True:
        begun = read(claim)
        assert isinstance(begun.body, BeginEntry), "a claim is the slot of a begin"
        if begun.body.branch:
            return begun
        if begun.body.base is None:
            return None
        claim = read(begun.body.base).claim
