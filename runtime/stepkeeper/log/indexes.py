"""Make the indexes of the log, each of what has changed since an earlier one, and put states together from them.

Pure. Of a slot, as 8 times a number to the base 4, the last digit that isn't 0 becomes 0: the index there goes on from
that one. So a state stands on few indexes, and what changed is written few times, however long the log is.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final

from stepkeeper.errors import ContradictedEntryError, LogFormatError
from stepkeeper.log.entries import (
    BeginEntry,
    Body,
    CommitEntry,
    DeleteEntry,
    Entry,
    QuarantineEntry,
    RestoredEntry,
)
from stepkeeper.log.records import CommitRecord, Index, IndexRef, Link
from stepkeeper.log.state import LogState

__all__ = [
    "base_slot",
    "folded",
    "is_indexed",
    "named_in",
    "noted",
    "overlaid",
    "relinked",
    "standing_on",
    "with_index",
]

_INTERVAL: Final = 8
"""Every slot that is a multiple of it has an index, and every begin."""

_RADIX: Final = 4
"""So many indexes of one size are followed by one that is as large as all of them."""


def is_indexed(slot: int, body: Body) -> bool:
    """Tell whether the entry in `slot` has an index."""
    return isinstance(body, BeginEntry) or slot % _INTERVAL == 0


def base_slot(slot: int) -> int:
    """Find the slot of the index that the index in `slot`, which isn't 0, goes on from."""
    if slot % _INTERVAL:
        return slot - slot % _INTERVAL
    size = _INTERVAL
    while slot % (size * _RADIX) == 0:
        size *= _RADIX
    return slot - slot % (size * _RADIX)


def noted(chain: Sequence[Link], commits: Collection[int], owners: Collection[str]) -> tuple[Link, ...]:
    """Add to a chain what has changed since its last index."""
    if not chain:
        return ()
    *below, last = chain
    return (*below, replace(last, commits=last.commits.union(commits), owners=last.owners.union(owners)))


def with_index(before: LogState, slot: int, nonce: str, body: Body) -> tuple[LogState, Index]:
    """Make the index of the entry in `slot`.

    Args:
        before: The state after the entry, with a chain that doesn't have it yet.
        slot: The entry's slot.
        nonce: The entry's nonce.
        body: What the entry says.

    Returns:
        The state with the chain that has it, and the index.

    """
    whole = not before.chain or _is_repair(body)
    chain = () if whole else _merged(before, base_slot(slot))
    state = replace(before, chain=(*chain, _link(slot, nonce, body)))
    index = _whole(before) if whole else _difference(before, chain[-1])
    return state, index


def standing_on(state: LogState, base: IndexRef) -> LogState:
    """Let a state, from before `base`, stand for the one after it. What `base` itself said is missing."""
    chain = _merged(state, base_slot(base.slot)) if state.chain else ()
    # The nonce of slot 0 is the root's name.
    return replace(state, tail=base.slot, root=state.root or base.nonce, chain=(*chain, Link(base=base)))


def folded(state: LogState, slot: int, entry: Entry, *, stands_in: bool = False) -> LogState:
    """Compute the state after the entry in `slot` from its index and the state after the index's base.

    Args:
        state: The state after the base; the empty one if the index is whole.
        slot: The entry's slot.
        entry: The entry.
        stands_in: The state is one from `standing_on`: what the base said is only in this index.

    Raises:
        ContradictedEntryError: The entry has no index.
        LogFormatError: It has one that doesn't fit.

    """
    index = entry.index
    if index is None or entry.after.index != slot:
        raise ContradictedEntryError(f"its index was in slot {slot}, which carries none", slot + 1)
    if index.base is None:
        if slot and not _is_repair(entry.body):
            raise LogFormatError(f"slot {slot} has an index that goes on from nothing")
        state = LogState()
    elif not state.chain or state.chain[-1].base != index.base or index.base.slot >= slot:
        raise LogFormatError(f"slot {slot} goes on from the index of {index.base}, which isn't the one there")
    elif state.root != entry.after.root:
        raise LogFormatError(f"slot {slot} is of the root {entry.after.root}, but this is {state.root}")
    gone = _gone_of(state, index)
    after = overlaid(state, slot, entry, index, gone)
    changed = {*gone, *(record.slot for record in index.commits)}
    owners = [owner.uid for owner in index.owners]
    chain = state.chain
    if stands_in:
        after, moved = relinked(after, state)
        chain = (*noted(chain[:-1], changed | moved, owners), *chain[-1:])
    _check_whole(after, slot, index.commits)
    return replace(after, chain=(*noted(chain, changed, owners), _link(slot, entry.nonce, entry.body)))


def overlaid(
    state: LogState, slot: int, entry: Entry, index: Index, gone: Collection[int] | None = None
) -> LogState:
    """Put what an index says over a state after its base or later. The chain stays as it is."""
    commits = dict(state.commits)
    for commit in _gone_of(state, index) if gone is None else gone:
        commits.pop(commit, None)
    commits.update((record.slot, record) for record in index.commits)
    owners = dict(state.owners)
    for owner in index.owners:
        owners.pop(owner.uid, None)
        owners[owner.uid] = owner
    begun = index.base is None or entry.after.claim >= index.base.slot
    return replace(
        state,
        tail=slot,
        root=entry.after.root,
        head=entry.after.head,
        claim=entry.after.claim,
        commits=commits,
        legacy=index.legacy,
        branching=bool(index.branching),
        owner=index.owner if begun else state.owner,
        host=index.host if begun else state.host,
        owners=owners,
    )


def relinked(state: LogState, before: LogState) -> tuple[LogState, frozenset[int]]:
    """Let commits whose parent isn't live any more go on from the nearest that is; return which these are, too.

    Args:
        state: The state to change.
        before: A state in which these parents are.

    """

    def is_live(slot: int) -> bool:
        return slot in state.commits and not state.commits[slot].quarantined

    moved = {}
    for record in state.commits.values():
        parent, legacy = record.parent, record.legacy
        while parent is not None and not is_live(parent) and parent in before.commits:
            below = before.commits[parent]
            parent, legacy = below.parent, below.legacy
        if parent != record.parent:
            moved[record.slot] = replace(record, parent=parent, legacy=legacy)
    return replace(state, commits={**state.commits, **moved}), frozenset(moved)


def named_in(slot: int, body: Body) -> tuple[Collection[int], Collection[str]]:
    """Return the commits and the owners that an entry itself says something of, in whatever state."""
    match body:
        case CommitEntry():
            return (slot,), ()
        case DeleteEntry():
            return body.commits, ()
        case QuarantineEntry() | RestoredEntry():
            return (body.commit,), ()
        case BeginEntry() if body.owner is not None:
            return (), (body.owner.uid,)
        case _:
            return (), ()


def _is_repair(body: Body) -> bool:
    return isinstance(body, BeginEntry) and body.lost is not None


def _link(slot: int, nonce: str, body: Body) -> Link:
    commits, owners = named_in(slot, body)
    ref = IndexRef(slot=slot, nonce=nonce, repair=_is_repair(body) or None)
    return Link(base=ref, commits=frozenset(commits), owners=frozenset(owners))


def _merged(state: LogState, base: int) -> tuple[Link, ...]:
    """Return the chain up to the index at `base`, or to its oldest one. What has changed since is the last one's."""
    kept = [link for link in state.chain if link.base.slot <= base] or [state.chain[0]]
    last = kept[-1]
    commits = last.commits.union(*(link.commits for link in state.chain[len(kept) :]))
    owners = last.owners.union(*(link.owners for link in state.chain[len(kept) :]))
    # What came and went since is of no concern to anybody.
    known = frozenset(slot for slot in commits if slot <= last.base.slot or slot in state.commits)
    return (*kept[:-1], replace(last, commits=known, owners=owners))


def _whole(state: LogState) -> Index:
    return Index(
        commits=tuple(state.commits.values()),
        owners=tuple(state.owners.values()),
        owner=state.owner,
        host=state.host,
        legacy=state.legacy,
        branching=state.branching or None,
    )


def _difference(state: LogState, since: Link) -> Index:
    begun = state.claim is not None and state.claim >= since.base.slot
    return Index(
        base=since.base,
        commits=tuple(state.commits[slot] for slot in sorted(since.commits) if slot in state.commits),
        gone=tuple(_spans(state, sorted(slot for slot in since.commits if slot not in state.commits))),
        owners=tuple(owner for uid, owner in state.owners.items() if uid in since.owners),
        owner=state.owner if begun else None,
        host=state.host if begun else "",
        legacy=state.legacy,
        branching=state.branching or None,
    )


def _spans(state: LogState, gone: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Write slots as few ranges: one goes on as long as there is no commit in it."""
    left = list(state.commits) if gone else []
    first = last = None
    for slot in gone:
        if first is None or last is None:
            first = slot
        elif bisect_right(left, slot) > bisect_right(left, last):
            yield first, last
            first = slot
        last = slot
    if first is not None and last is not None:
        yield first, last


def _gone_of(state: LogState, index: Index) -> frozenset[int]:
    """Return the commits that went since the base. A range's ends are commits also if the state doesn't have them."""
    if not index.gone:
        return frozenset()
    slots = sorted(state.commits)
    found = {slot for span in index.gone for slot in span}
    for first, last in index.gone:
        found.update(slots[bisect_right(slots, first) : bisect_right(slots, last)])
    return frozenset(found)


def _check_whole(state: LogState, slot: int, changed: Collection[CommitRecord]) -> None:
    """Check that what the state names is in it. Raises LogFormatError."""
    named = {state.head, *(record.parent for record in changed)} - {None}
    if missing := sorted(each for each in named if each is not None and each not in state.commits):
        raise LogFormatError(f"slot {slot} names commit {missing[0]}, which isn't there")
