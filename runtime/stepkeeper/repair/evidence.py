"""Find out from the entries that can be read what those said that can't. Pure."""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from stepkeeper.errors import DamagedEntryError
from stepkeeper.log.entries import CommitEntry, DeleteEntry, Entry, QuarantineEntry, RestoredEntry, VoidEntry
from stepkeeper.log.records import ManifestRef
from stepkeeper.log.replay import state_at
from stepkeeper.log.state import LogState

__all__ = ["Evidence", "FoundSave", "assign_saves", "find_evidence", "find_start", "named_folders"]

Entries = Sequence[Entry | None]
"""The log by slot; None for an entry that is damaged or gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSave:
    """A save whose objects are in the root, and that no entry which can be read tells of."""

    folder: str
    step: int
    claim: int
    size_bytes: int
    """The bytes of all its objects, as its manifests have it."""

    manifest: ManifestRef
    fault: str | None = None
    """What isn't there as its manifests have it. None: all objects are there, and as long as they should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Conclusions from later entries about slots that can't be read."""

    commits: Mapping[int, int | None]
    """Slots that were commits and weren't deleted since, each with its claim if that is known."""

    maybe_deleted: frozenset[int]
    """Those of them that an entry that can't be read may have deleted."""

    begins: frozenset[int]
    """Slots that were begins."""


def find_start(entries: Entries) -> tuple[int, LogState]:
    """Find the newest entry with an index from which a reader can go on, and the state after it.

    If there is none, that is -1 and the state of an empty log.
    """
    for slot, entry in reversed(list(enumerate(entries))):
        if entry is not None and entry.index is not None:
            with contextlib.suppress(DamagedEntryError):
                return slot, state_at(slot, partial(_readable, entries), damaged=lambda _: None)
    return -1, LogState()


def _readable(entries: Entries, slot: int) -> Entry:
    entry = entries[slot]
    if entry is None:
        raise DamagedEntryError(f"slot {slot} can't be read")
    return entry


def named_folders(entry: Entry) -> frozenset[str]:
    """Return the folders whose saves this entry tells of."""
    folders = {record.folder for record in entry.index.commits} if entry.index is not None else set()
    if isinstance(entry.body, CommitEntry | VoidEntry):
        folders.add(entry.body.folder)
    return frozenset(folders)


def find_evidence(entries: Entries, start: int) -> Evidence:
    """Find what the entries after `start` tell of the slots after it that can't be read.

    Args:
        entries: The log.
        start: The newest entry with an index; -1 if there is none.

    """
    shown: dict[int, int] = {}
    deleted: set[int] = set()
    begins = {0} if start < 0 else set()
    told: set[int] = set()
    for at, entry in enumerate(entries[start + 1 :], start + 1):
        if entry is not None:
            shown |= dict.fromkeys(_named_commits(entry), at)
            deleted |= set(entry.body.commits) if isinstance(entry.body, DeleteEntry) else set()
            begins.add(entry.after.claim)
            told |= {record.slot for record in entry.index.commits} if entry.index is not None else set()
    lost = {slot for slot, entry in enumerate(entries) if entry is None and slot > start}
    last_unknown = max(lost - begins - set(shown) - told, default=-1)
    # What an index tells of needs no proof.
    commits = sorted((set(shown) - deleted - told) & lost)
    return Evidence(
        commits={slot: _claim_at(entries, slot) for slot in commits},
        maybe_deleted=frozenset(slot for slot in commits if shown[slot] < last_unknown),
        begins=frozenset(begins & lost),
    )


def assign_saves(evidence: Evidence, saves: Collection[FoundSave]) -> dict[int, FoundSave]:
    """Find which save a slot committed, where only one is possible.

    It is possible for a slot that was a commit of a known claim, if the claim has no other such slot and one save
    only that no entry tells of. The data of a live commit is there, so that save is the slot's. Of a commit that may
    have been deleted the data may be gone, and the save may be one that never was committed.

    Args:
        evidence: What is known of the slots.
        saves: The saves that no entry tells of.

    Returns:
        The saves, by slot.

    """
    claims = list(evidence.commits.values())
    if None in claims:
        return {}
    found = {}
    for slot, claim in evidence.commits.items():
        possible = [save for save in saves if save.claim == claim]
        is_alone = claims.count(claim) == 1 and len(possible) == 1
        if is_alone and slot not in evidence.maybe_deleted and possible[0].fault is None:
            found[slot] = possible[0]
    return found


def _named_commits(entry: Entry) -> set[int]:
    """Return the slots that the entry names as commits whose data is there."""
    named = {entry.after.head}
    if entry.index is not None:
        named |= {record.parent for record in entry.index.commits}
    match entry.body:
        case CommitEntry():
            named.add(entry.body.parent)
        case RestoredEntry() | QuarantineEntry():
            named.add(entry.body.commit)
        case _:
            pass
    return {slot for slot in named if slot is not None}


def _claim_at(entries: Entries, slot: int) -> int | None:
    """Find the claim that `slot` was written under. None: a begin near it can't be read, and it isn't known."""
    later = next((entry for entry in entries[slot + 1 :] if entry is not None), None)
    if later is not None and later.claim < slot:
        return later.claim
    before = entries[slot - 1] if slot else None
    return None if before is None else before.after.claim
