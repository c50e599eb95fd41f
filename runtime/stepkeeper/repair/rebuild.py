"""Rebuild the state of a log of which entries are damaged or gone. Pure.

Up to the damage it is what the log says.
"""

from collections.abc import Collection, Mapping, Sequence
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
from stepkeeper.log.replay import apply
from stepkeeper.log.state import LogState, applied, quarantined, without
from stepkeeper.repair.placing import Entries
from stepkeeper.repair.saves import FoundSave

__all__ = ["Rebuilt", "find_contradiction", "rebuild"]


_NO_SLOT: Final = "no lost slot is certainly its own"
_HALF_DELETED: Final = "part of it is deleted: %s is missing"


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
    """Commits in the log without any data left: an entry that can't be read has deleted them."""


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


def rebuild(
    start: LogState,
    entries: Entries,
    placed: Mapping[int, FoundSave],
    rest: Sequence[FoundSave],
    objects: Mapping[str, Collection[str]],
) -> Rebuilt:
    """Rebuild the state after the last of `entries`.

    Args:
        start: The state before them.
        entries: The entries.
        placed: The saves that count as commits, by the slot that each gets.
        rest: The saves to keep without counting them.
        objects: The names of the objects in each folder of a save.

    """
    state = _replayed(start, entries, placed)
    last_lost = max((slot for slot, entry in entries.items() if entry is None), default=-1)
    deleted = tuple(
        record
        for record in state.commits.values()
        if record.folder not in objects and last_lost > record.slot
    )
    state = without(state, [record.slot for record in deleted], state.tail)
    torn = {
        record.slot: _HALF_DELETED % missing
        for record in state.live
        if last_lost > record.slot and (missing := _missing(objects[record.folder])) is not None
    }
    for slot in torn:
        state = quarantined(state, state.commits[slot], state.tail)
    aside = dict(enumerate(rest, state.tail + 1))
    kept = {slot: replace(save.record, slot=slot, quarantined=True) for slot, save in aside.items()}
    return Rebuilt(
        state=replace(state, tail=state.tail + len(rest), commits={**state.commits, **kept}),
        found=tuple(record for record in state.live if record.slot in placed),
        aside=torn | {slot: save.fault or _NO_SLOT for slot, save in aside.items()},
        deleted=deleted,
    )


def _missing(names: Collection[str]) -> str | None:
    """Find what is gone of a save whose deletion was cut short: `.metadata` goes first."""
    return next((name for name in (METADATA_NAME, manifest_name(0)) if name not in names), None)


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
    """Pass over a slot that can't be read; the save that counts as its commit continues from what came before."""
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
        # Its base was HEAD; if that isn't known, the nearest one is that is.
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
