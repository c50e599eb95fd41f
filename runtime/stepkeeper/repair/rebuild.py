"""Rebuild the state of a log of which entries are damaged or gone. Pure.

What the others and the saves in the root prove is in it, and nothing else is live.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stepkeeper.errors import RefusedError
from stepkeeper.log.entries import BeginEntry, Entry
from stepkeeper.log.records import CommitRecord
from stepkeeper.log.state import LogState, without
from stepkeeper.repair.evidence import Entries, FoundSave, assign_saves, find_evidence, find_start
from stepkeeper.repair.partial_replay import PartialReplay, record_of

__all__ = ["Rebuilt", "rebuild", "repair_body"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """The known part of a damaged log."""

    state: LogState
    """The state after its last slot: what is proven is live; what may have been a commit is quarantined."""

    start: int
    """The newest entry with an index that can be read; -1 if there is none."""

    lost: tuple[int, ...]
    """The slots that can't be read."""

    proven: tuple[CommitRecord, ...]
    """Commits whose entry can't be read, and that other entries and their data prove."""

    unproven: tuple[CommitRecord, ...]
    """Saves that may have been commits. In the state they are quarantined, so that their data stays."""

    reserved: tuple[int, ...] = ()
    """Slots after the last one that such saves take, because there are more of them than lost slots."""

    adopted: CommitRecord | None = None
    """The one of those that somebody has chosen to be HEAD."""

    deleted: tuple[CommitRecord, ...] = ()
    """Commits without any data left: an entry that can't be read has deleted them."""

    doubts: tuple[str, ...] = ()
    """What can't be known, for people."""

    @property
    def is_needed(self) -> bool:
        """True if a reader needs an entry that can't be read."""
        return any(slot > self.start for slot in self.lost)


def rebuild(
    entries: Sequence[Entry | None],
    saves: Collection[FoundSave],
    folders: Collection[str],
    *,
    adopt: str | None = None,
) -> Rebuilt:
    """Rebuild the state after the last of `entries`.

    Args:
        entries: The log by slot; None for what is damaged or gone.
        saves: The saves in the root that no entry tells of.
        folders: All folders in the root that hold an object of a save.
        adopt: Folder of a save that isn't proven to have been committed, and that is to be HEAD all the same.

    Raises:
        LogFormatError: The entries contradict each other, which no damage explains.
        RefusedError: `adopt` names none of the saves that may have been commits, or one that HEAD has come after.

    """
    lost = tuple(slot for slot, entry in enumerate(entries) if entry is None)
    start, known = find_start(entries)
    doubtful = tuple(slot for slot in lost if slot > start)
    evidence = find_evidence(entries, start)
    possible = [save for save in saves if any(slot > save.claim for slot in doubtful)]
    assigned = assign_saves(evidence, possible)
    replay = PartialReplay(known, doubtful, assigned)
    for slot in range(start + 1, len(entries)):
        replay.read(slot, entries[slot])
    state, deleted = _without_deleted(replay.state, doubtful, folders)
    taken = {*evidence.begins, *assigned, *state.commits}
    free = dict.fromkeys(slot for slot in (*doubtful, *lost) if slot not in taken)
    rest = [save for save in possible if save not in assigned.values()]
    places = _place_unproven(rest, tuple(free), len(entries), adopt=adopt)
    if adopt is not None:
        _check_adopted(places, adopt, -1 if state.head is None else state.head, len(entries))
    reserved = tuple(range(len(entries), 1 + max(places, default=-1)))
    unproven = tuple(record_of(slot, save, state) for slot, save in places.items())
    adopted = next((record for record in unproven if record.folder == adopt), None)
    return Rebuilt(
        state=_with_unproven(replace(state, tail=len(entries) + len(reserved) - 1), unproven, adopted),
        start=start,
        lost=(*lost, *reserved),
        reserved=reserved,
        proven=tuple(state.commits[slot] for slot in assigned if slot in state.commits),
        unproven=tuple(record for record in unproven if record is not adopted),
        adopted=adopted,
        deleted=deleted,
        doubts=_doubts(
            entries, doubtful, evidence.begins, set(evidence.commits) - set(assigned) - set(state.commits)
        ),
    )


def repair_body(rebuilt: Rebuilt, entries: Sequence[Entry | None], host: str) -> BeginEntry:
    """Make the begin that repairs the log: it goes on from where the log had come to, for the same owner."""
    state = rebuilt.state
    claim = None if state.claim is None else entries[state.claim]
    begun = claim.body if claim is not None else None
    anew = state.head is None and isinstance(begun, BeginEntry) and begun.scratch
    return BeginEntry(
        base=state.head,
        legacy=None if state.head is not None else state.legacy,
        scratch=anew or None,
        owner=state.owner,
        host=host,
        lost=rebuilt.lost,
    )


def _without_deleted(
    state: LogState, doubtful: Collection[int], folders: Collection[str]
) -> tuple[LogState, tuple[CommitRecord, ...]]:
    """Leave out what an entry that can't be read has deleted: nothing of its data is there.

    HEAD too: the latest commit is never deleted, so there was a later one, whose entry can't be read either.
    """
    deleted = tuple(
        record
        for record in state.commits.values()
        if record.folder not in folders and max(doubtful, default=-1) > record.slot
    )
    return without(state, [record.slot for record in deleted], state.tail), deleted


def _place_unproven(
    saves: Collection[FoundSave], free: Sequence[int], end: int, *, adopt: str | None
) -> dict[int, FoundSave]:
    """Give each save the slot of an entry that may have been its commit, or one from `end` on if there are too few.

    The save that is to be HEAD gets the last one.
    """
    left, places = [*free, *range(end, end + len(saves))], dict[int, FoundSave]()
    for save in sorted(saves, key=lambda save: (save.folder != adopt, save.claim, save.step, save.folder)):
        slots = [slot for slot in left if slot > save.claim]
        lost = [slot for slot in slots if slot < end]
        slot = max(lost) if lost and save.folder == adopt else slots[0]
        places[slot] = save
        left.remove(slot)
    return places


def _check_adopted(places: Mapping[int, FoundSave], adopt: str, head: int, end: int) -> None:
    """Check that the save `adopt` can have been committed after `head`, before `end`. Raises RefusedError."""
    slot = next((slot for slot, save in places.items() if save.folder == adopt), None)
    fault = None if slot is None else places[slot].fault
    if slot is None or fault is not None:
        choice = ", ".join(save.folder for save in places.values() if save.fault is None)
        why = f": {fault}" if fault else ""
        raise RefusedError(
            f"{adopt} is none of the whole saves to choose from ({choice or 'there are none'}){why}"
        )
    if not head < slot < end:
        raise RefusedError(
            f"{adopt} can't have been committed after slot {head}, the latest commit: no later slot is unreadable"
        )


def _with_unproven(
    state: LogState, unproven: Sequence[CommitRecord], adopted: CommitRecord | None
) -> LogState:
    commits = dict(state.commits)
    for record in unproven:
        commits[record.slot] = record if record is adopted else replace(record, quarantined=True)
    state = replace(state, commits=dict(sorted(commits.items())))
    return state if adopted is None else replace(state, head=adopted.slot, legacy=None)


def _doubts(
    entries: Entries, doubtful: Collection[int], begins: Collection[int], unassigned: Collection[int]
) -> tuple[str, ...]:
    last = max((slot for slot, entry in enumerate(entries) if entry is not None), default=-1)
    found = []
    for slot in doubtful:
        if slot in begins:
            found.append(
                f"slot {slot} was a claim of the root; its owner, and what it went on from, aren't known"
            )
        elif slot in unassigned:
            found.append(f"slot {slot} was a commit; of which save, and when, isn't known")
        elif slot > last:
            found.append(f"slot {slot}: no later entry tells what it was, perhaps the latest commit")
    return tuple(found)
