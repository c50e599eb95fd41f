"""Rebuild the state of a log of which entries are damaged or gone. Pure.

Up to the damage it is what the log says. A save without an entry that is whole counts as a commit if a lost slot can
have been its own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

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
from stepkeeper.log.replay import apply
from stepkeeper.log.state import LogState, applied, without
from stepkeeper.repair.saves import FoundSave

__all__ = ["Rebuilt", "find_contradiction", "place_saves", "rebuild"]

Entries = Mapping[int, Entry | None]
"""The entries by slot, without a gap; None for one that is damaged or gone."""


_NO_SLOT: Final = "no slot is left that it can have been committed in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """The known part of a damaged log."""

    state: LogState
    """The state after its last slot, and after those that are added for saves that have none of their own."""

    found: tuple[CommitRecord, ...] = ()
    """Commits of the state whose entries can't be read."""

    aside: Mapping[int, str] = field(default_factory=dict)
    """Why each of these commits of the state is quarantined, by slot: it isn't whole, or was hardly ever committed."""

    deleted: tuple[CommitRecord, ...] = ()
    """Commits that the log tells of without any data left: an entry that can't be read has deleted them."""


def find_contradiction(state: LogState, entries: Entries) -> tuple[int, str] | None:
    """Find the first entry after `state` that contradicts those before it, up to the first lost one, and say how."""
    for slot, entry in entries.items():
        if entry is None:
            return None
        try:
            state = apply(state, slot, entry)
        except LogFormatError as error:
            return slot, str(error)
    return None


def place_saves(
    saves: Iterable[FoundSave], entries: Entries, claims: Collection[int], tail: int
) -> tuple[dict[int, FoundSave], list[FoundSave]]:
    """Give each save that is whole a lost slot that may have been its commit's: by order, as they were made.

    A claim's commits are in the slots before the next claim. If the claim itself is after the log's tail, the end of
    the log is lost, and there were as many slots as it takes.

    Args:
        saves: The saves that no entry tells of.
        entries: The entries.
        claims: The slots that are known to be claims.
        tail: The greatest slot that is there.

    Returns:
        The saves by slot, and those that may have been commits but aren't whole, or get no slot.

    """
    bodies = [entry.body for entry in entries.values() if entry is not None]
    taken = {slot for body in bodies if isinstance(body, DeleteEntry) for slot in body.commits} | {*claims}
    lost = [slot for slot, entry in entries.items() if entry is None]
    placed: dict[int, FoundSave] = {}
    rest = []
    for save in sorted(saves, key=lambda each: (each.record.claim, each.record.step, each.record.folder)):
        claim = save.record.claim
        end = min((slot for slot in claims if slot > claim), default=None)
        if not any(claim <= slot and (end is None or slot <= end) for slot in lost):
            # Every slot that its commit could be in can be read, and so can the next claim: it never was committed.
            continue
        after = max(claim, *placed, -1)
        slot = next((each for each in lost if each > after and each not in taken), end)
        if slot is None and claim > tail:
            slot = max(after, *entries) + 1
        if save.fault is None and slot is not None and (end is None or slot < end):
            placed[slot] = save
        else:
            rest.append(save)
    return placed, rest


def rebuild(
    start: LogState,
    entries: Entries,
    placed: Mapping[int, FoundSave],
    rest: Sequence[FoundSave],
    folders: Collection[str],
) -> Rebuilt:
    """Rebuild the state after the last of `entries`.

    Args:
        start: The state before them.
        entries: The entries.
        placed: The saves that count as commits, by the slot that each gets.
        rest: The saves to keep without counting them.
        folders: All folders in the root that hold an object of a save.

    """
    state = _replayed(start, entries, placed)
    last_lost = max((slot for slot, entry in entries.items() if entry is None), default=-1)
    deleted = tuple(
        record
        for record in state.commits.values()
        if record.folder not in folders and last_lost > record.slot
    )
    state = without(state, [record.slot for record in deleted], state.tail)
    aside = dict(enumerate(rest, state.tail + 1))
    quarantined = {slot: replace(save.record, slot=slot, quarantined=True) for slot, save in aside.items()}
    return Rebuilt(
        state=replace(state, tail=state.tail + len(rest), commits={**state.commits, **quarantined}),
        found=tuple(record for record in state.live if record.slot in placed),
        aside={slot: save.fault or _NO_SLOT for slot, save in aside.items()},
        deleted=deleted,
    )


def _replayed(start: LogState, entries: Entries, placed: Mapping[int, FoundSave]) -> LogState:
    state, exact = start, True
    for slot in range(start.tail + 1, max([*entries, *placed, start.tail]) + 1):
        entry = entries.get(slot)
        exact = exact and entry is not None
        if entry is None:
            state = _lost(state, slot, placed.get(slot))
        else:
            state = apply(state, slot, entry) if exact else _past_damage(state, slot, entry)
    return state


def _lost(state: LogState, slot: int, save: FoundSave | None) -> LogState:
    """Pass over a slot that can't be read; the save that counts as its commit goes on from what came before."""
    if save is None:
        return replace(state, tail=slot)
    parent, legacy = state.next_base
    record = replace(save.record, slot=slot, parent=parent, legacy=legacy)
    commits = {**state.commits, slot: record}
    return replace(
        state, tail=slot, claim=record.claim, head=slot, legacy=None, branching=False, commits=commits
    )


def _past_damage(state: LogState, slot: int, entry: Entry) -> LogState:
    """Apply an entry to what is known of the state before it."""
    state = replace(state, tail=slot - 1, claim=entry.claim, root=entry.after.root)
    live = {record.slot for record in state.live}
    body = entry.body
    if isinstance(body, CommitEntry):
        # What it goes on from was HEAD; if that isn't known, the nearest one is that is.
        parent = body.parent if body.parent is None or body.parent in live else state.head
        legacy = body.legacy if body.parent is None else state.legacy if parent is None else None
        state = replace(state, head=parent, legacy=legacy, branching=False)
        body = replace(body, parent=parent, legacy=legacy)
    state = applied(state, slot, entry.claim, entry.nonce, _known_part(body, state, live))
    head = entry.after.head
    if head is None or (head in state.commits and not state.commits[head].quarantined):
        state = replace(state, head=head)
    return state


def _known_part(body: Body, state: LogState, live: Collection[int]) -> Body:
    """Leave out what the entry says of commits that aren't known."""
    nothing = VoidEntry(folder="", reason="")
    match body:
        case BeginEntry() if body.base is not None and body.base not in live:
            return replace(body, base=state.head, legacy=state.legacy if state.head is None else None)
        case DeleteEntry():
            return DeleteEntry(commits=tuple(slot for slot in body.commits if slot in state.commits))
        case QuarantineEntry() | RestoredEntry() if body.commit not in live:
            return nothing
        case _:
            return body
