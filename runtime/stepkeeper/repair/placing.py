"""Find out which save without an entry can have been the commit of which lost slot. Pure.

A wrong HEAD is worse than a commit that is kept aside: a save that may be what a later entry condemns or deletes gets
no slot.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from stepkeeper.log.entries import CommitEntry, DeleteEntry, Entry, QuarantineEntry
from stepkeeper.log.records import CommitRecord
from stepkeeper.log.state import LogState
from stepkeeper.repair.saves import FoundSave

__all__ = ["Entries", "place_saves"]

Entries = Mapping[int, Entry | None]
"""The entries by slot, without a gap; None for one that is damaged or gone."""


def place_saves(
    saves: Iterable[FoundSave],
    start: LogState,
    entries: Entries,
    *,
    lost_before: Collection[int],
    claims: Collection[int],
    tail: int,
) -> tuple[dict[int, FoundSave], list[FoundSave]]:
    """Give each save that is whole a lost slot that may have been its commit's.

    A claim's commits are in the slots before the next claim, in the order of their steps. If the claim itself is after
    the log's tail, the end of the log is lost, and there were as many slots as it takes.

    Args:
        saves: The saves that no entry names.
        start: The state before the entries.
        entries: The entries.
        lost_before: The slots of the claim of `start` that are before the entries and can't be read.
        claims: The slots that are known to be claims.
        tail: The greatest slot that is there.

    Returns:
        The saves by slot, and those that may have been commits but aren't whole, or get no slot.

    """
    lost = [*sorted(lost_before), *(slot for slot, entry in entries.items() if entry is None)]
    gaps: dict[tuple[int, int, int | None], list[FoundSave]] = {}
    rest, known = [], _known(start, entries)
    for save in sorted(saves, key=lambda each: (each.record.claim, each.record.step, each.record.folder)):
        claim = save.record.claim
        end = min((slot for slot in claims if slot > claim), default=None)
        if not any(claim <= slot and (end is None or slot <= end) for slot in lost):
            # Every slot that its commit could be in can be read, and so can the next claim: it never was committed.
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
            slots = [*range(max(entries, default=tail) + 1, max(entries, default=tail) + 1 + len(fitting))]
        is_last = not any(of == claim and slot > after for of, _, slot in known)
        found = _placed_in(slots, fitting, entries, is_last=is_last)
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


def _placed_in(
    slots: Sequence[int], saves: Sequence[FoundSave], entries: Entries, *, is_last: bool
) -> dict[int, FoundSave]:
    """Give the newest save the last of these slots, and so on down, but for those that may be condemned or deleted."""
    bodies = [entry.body for entry in entries.values() if entry is not None]
    condemned = {body.commit for body in bodies if isinstance(body, QuarantineEntry)}
    deleted = {slot for body in bodies if isinstance(body, DeleteEntry) for slot in body.commits}
    surplus = len(saves) - len(slots)
    doubtful: set[int] = set()
    for place, slot in enumerate(slots):
        if slot in condemned | deleted:
            first, last = sorted((place, place + surplus))
            # HEAD isn't deleted: a newer save is there, among these if no later commit is known.
            newest = is_last and slot in deleted - condemned and place < len(slots) - 1
            doubtful |= {*range(first, min(last, len(saves) - 1 - newest) + 1)}
    return {
        slots[index - surplus]: save
        for index, save in enumerate(saves)
        if index >= surplus and index not in doubtful
    }
