"""Rebuild the state of a log that has damaged or missing entries. Pure.

Up to the damage, it is the log's state. A wrong HEAD is worse than a quarantined commit: a save that a later
entry may condemn or delete gets no slot.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from stepkeeper.checkpoint.dcp_format.metadata import METADATA_NAME
from stepkeeper.checkpoint.manifest import manifest_name
from stepkeeper.errors import LogFormatError
from stepkeeper.log.entries import (
    BeginEntry,
    Body,
    CommitEntry,
    DeleteEntry,
    Entry,
    QuarantineEntry,
    RestoredEntry,
    VoidEntry,
)
from stepkeeper.log.records import CommitRecord
from stepkeeper.log.replay import apply_entry
from stepkeeper.log.state import LogState, apply_body, quarantine_commit, remove_commits
from stepkeeper.repair.saves import FoundSave

__all__ = ["Rebuilt", "find_contradiction", "place_saves", "rebuild"]

_NO_SLOT: Final = "no lost slot is certain to be its own"
_HALF_DELETED: Final = "part of it is deleted: %s is missing"

Entries = Mapping[int, Entry | None]
"""The entries by slot, without a gap; None for one that is damaged or gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """The known part of a damaged log."""

    state: LogState
    """The state after its last slot, and after the slots that are added for saves without one."""

    found: tuple[CommitRecord, ...] = ()
    """Commits of the state whose entries can't be read."""

    aside: Mapping[int, str] = field(default_factory=dict)
    """Why each of these commits of the state is quarantined, by slot: not whole, or probably never committed."""

    deleted: tuple[CommitRecord, ...] = ()
    """Commits in the log without any data left: an entry that can't be read has deleted them."""


def find_contradiction(state: LogState, entries: Entries) -> tuple[int, str] | None:
    """Find the first entry after `state`, up to the first lost one, that contradicts those before it, and the fault."""
    for slot, entry in entries.items():
        if entry is None:
            return None
        try:
            state = apply_entry(state, slot, entry)
        except LogFormatError as error:
            return slot, str(error)
    return None


def rebuild(
    start: LogState,
    entries: Entries,
    placed: Mapping[int, FoundSave],
    rest: Sequence[FoundSave],
    objects: Mapping[str, Collection[str]],
) -> Rebuilt:
    """Rebuild the state after the last of `entries`, which follow `start`.

    Args:
        start: The state before them.
        entries: The entries.
        placed: The saves that count as commits, by the slot that each gets.
        rest: The saves to keep without counting them.
        objects: The names of the objects in each folder of a save.
    """
    state = _replay(start, entries, placed)
    last_lost = max((slot for slot, entry in entries.items() if entry is None), default=-1)
    # A lost entry may have deleted commits before it. These have no data any more, or lack the first objects.
    deleted = tuple(
        record
        for record in state.commits.values()
        if record.folder not in objects and last_lost > record.slot
    )
    state = remove_commits(state, [record.slot for record in deleted], state.tail)
    torn = {
        record.slot: _HALF_DELETED % missing
        for record in state.live
        if last_lost > record.slot and (missing := _missing(objects[record.folder])) is not None
    }
    for slot in torn:
        state = quarantine_commit(state, state.commits[slot], state.tail)
    # The saves that don't count become quarantined commits after the log's end, so that nothing deletes their data.
    aside = dict(enumerate(rest, state.tail + 1))
    kept = {slot: replace(save.record, slot=slot, quarantined=True) for slot, save in aside.items()}
    return Rebuilt(
        state=replace(state, tail=state.tail + len(rest), commits={**state.commits, **kept}),
        found=tuple(record for record in state.live if record.slot in placed),
        aside=torn | {slot: save.fault or _NO_SLOT for slot, save in aside.items()},
        deleted=deleted,
    )


def _missing(names: Collection[str]) -> str | None:
    """Find the missing object of a save whose deletion was interrupted: `.metadata` is deleted first."""
    return next((name for name in (METADATA_NAME, manifest_name(0)) if name not in names), None)


def _replay(start: LogState, entries: Entries, placed: Mapping[int, FoundSave]) -> LogState:
    """Apply the entries: exactly up to the first lost one, and after that as far as what they name is known."""
    state, exact = start, True
    for slot in range(start.tail + 1, max([*entries, *placed, start.tail]) + 1):
        entry = entries.get(slot)
        exact = exact and entry is not None
        if entry is None:
            state = _skip_slot(state, slot, placed.get(slot))
        else:
            state = apply_entry(state, slot, entry) if exact else _apply_after_damage(state, slot, entry)
    return state


def _skip_slot(state: LogState, slot: int, save: FoundSave | None) -> LogState:
    """Skip a slot that can't be read; the save that counts as its commit continues from the state before."""
    if save is None:
        return replace(state, tail=slot)
    parent, legacy = state.next_base
    record = replace(save.record, slot=slot, parent=parent, legacy=legacy)
    commits = {**state.commits, slot: record}
    return replace(
        state, tail=slot, claim=record.claim, head=slot, legacy=None, branching=False, commits=commits
    )


def _apply_after_damage(state: LogState, slot: int, entry: Entry) -> LogState:
    """Apply an entry to the known part of the state before it."""
    state = replace(state, tail=slot - 1, claim=entry.claim, root=entry.after.root)
    live = {record.slot for record in state.live}
    body = entry.body
    if isinstance(body, CommitEntry):
        if body.parent is None:
            parent, legacy = None, body.legacy
        elif body.parent in live:
            parent, legacy = body.parent, None
        else:
            # HEAD was a commit that isn't known: use the nearest one that is.
            parent, legacy = state.head, state.legacy if state.head is None else None
        state = replace(state, head=parent, legacy=legacy, branching=False)
        body = replace(body, parent=parent, legacy=legacy)
    state = apply_body(state, slot, entry.claim, entry.nonce, _known_part(body, state, live))
    # Every entry records HEAD, which is known again once its commit is.
    head = entry.after.head
    if head is None or (head in state.commits and not state.commits[head].quarantined):
        state = replace(state, head=head)
    return state


def _known_part(body: Body, state: LogState, live: Collection[int]) -> Body:
    """Leave out the parts of the entry that name unknown commits."""
    match body:
        case BeginEntry() if body.base is not None and body.base not in live:
            return replace(body, base=state.head, legacy=state.legacy if state.head is None else None)
        case DeleteEntry():
            return DeleteEntry(commits=tuple(slot for slot in body.commits if slot in state.commits))
        case QuarantineEntry() | RestoredEntry() if body.commit not in live:
            return VoidEntry(folder="", reason="")  # changes nothing
        case _:
            return body


def place_saves(
    saves: Iterable[FoundSave],
    start: LogState,
    entries: Entries,
    *,
    lost_before: Collection[int],
    claims: Collection[int],
    tail: int,
) -> tuple[dict[int, FoundSave], list[FoundSave]]:
    """Assign to each whole save a lost slot that may have been its commit's.

    A claim's commits are in the slots before the next claim, in the order of their steps. If the claim itself
    is after the log's tail, the end of the log is lost, and it had as many slots as the saves need.

    Args:
        saves: The saves that no entry names.
        start: The state before the entries.
        entries: The entries.
        lost_before: The slots of the claim of `start` that are before the entries and can't be read.
        claims: The slots that are known to be claims.
        tail: The greatest slot that exists.

    Returns:
        The saves by slot, and those that may have been commits but aren't whole, or get no slot.
    """
    lost = [*sorted(lost_before), *(slot for slot, entry in entries.items() if entry is None)]
    # By claim, and the slots between which they may have been committed.
    gaps: dict[tuple[int, int, int | None], list[FoundSave]] = {}
    rest, known = [], _known(start, entries)
    for save in sorted(saves, key=lambda each: (each.record.claim, each.record.step, each.record.folder)):
        claim = save.record.claim
        end = min((slot for slot in claims if slot > claim), default=None)
        if not any(claim <= slot and (end is None or slot <= end) for slot in lost):
            # Every slot that its commit could be in can be read, and so can the next claim: it was never committed.
            continue
        if save.fault is None:
            gaps.setdefault((claim, *_bounds(save.record, known, end)), []).append(save)
        else:
            rest.append(save)
    placed: dict[int, FoundSave] = {}
    for (claim, after, before), fitting in gaps.items():
        slots = [
            slot for slot in lost if slot > after and (before is None or slot < before) and slot not in claims
        ]
        if before is None and claim > tail:
            # The log's end is lost, with this claim.
            first = max(entries, default=tail) + 1
            slots = list(range(first, first + len(fitting)))
        # True if no later commit of this claim is known.
        is_last = not any(of == claim and slot > after for of, _, slot in known)
        found = _assign_slots(slots, fitting, entries, is_last=is_last)
        # What was committed before the newest index, and isn't in it, has been deleted.
        found = {slot: save for slot, save in found.items() if slot > start.tail}
        placed |= found
        taken = {save.record.folder for save in found.values()}
        rest += [save for save in fitting if save.record.folder not in taken]
    return placed, rest


def _known(start: LogState, entries: Entries) -> list[tuple[int, int, int]]:
    """List the claim, the step and the slot of each commit that the log still has."""
    bodies = ((slot, entry.claim, entry.body) for slot, entry in entries.items() if entry is not None)
    return [(record.claim, record.step, record.slot) for record in start.commits.values()] + [
        (claim, body.step, slot) for slot, claim, body in bodies if isinstance(body, CommitEntry)
    ]


def _bounds(
    record: CommitRecord, known: Iterable[tuple[int, int, int]], end: int | None
) -> tuple[int, int | None]:
    """Find the slots between which a save's commit was: those of the commits of its claim next to it by step."""
    same = [(step, slot) for claim, step, slot in known if claim == record.claim]
    after = max((slot for step, slot in same if step < record.step), default=record.claim)
    return after, min((slot for step, slot in same if step > record.step), default=end)


def _assign_slots(
    slots: Sequence[int], saves: Sequence[FoundSave], entries: Entries, *, is_last: bool
) -> dict[int, FoundSave]:
    """Assign the last slot to the newest save, and so on down, except to saves that may be condemned or deleted."""
    bodies = [entry.body for entry in entries.values() if entry is not None]
    condemned = {body.commit for body in bodies if isinstance(body, QuarantineEntry)}
    deleted = {slot for body in bodies if isinstance(body, DeleteEntry) for slot in body.commits}
    surplus = len(saves) - len(slots)
    doubtful: set[int] = set()
    """The indices of saves that may have been in a slot which a later entry condemns or deletes."""

    for place, slot in enumerate(slots):
        if slot in condemned | deleted:
            # Other saves, or other slots, may be those of no commit: the slot's save is one from `first` to `last`.
            first, last = sorted((place, place + surplus))
            # HEAD is never deleted: a newer save exists, among these if no later commit is known.
            newest = is_last and slot in deleted - condemned and place < len(slots) - 1
            doubtful |= {*range(first, min(last, len(saves) - 1 - newest) + 1)}
    return {
        slots[index - surplus]: save
        for index, save in enumerate(saves)
        if index >= surplus and index not in doubtful
    }
