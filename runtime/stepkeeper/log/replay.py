"""Replay the log: entry by entry, or from the newest index. Pure but for the reading."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from stepkeeper.errors import ContradictedEntryError, DamagedEntryError, LogFormatError
from stepkeeper.log.entries import BeginEntry, Body, Entry
from stepkeeper.log.records import CommitRecord, Index, IndexRef, StateAfter
from stepkeeper.log.state import LogState, applied, without

__all__ = ["ReadEntry", "apply", "entry_for", "state_at"]

ReadEntry = Callable[[int], Entry]
"""Reads the entry in a slot. Raises DamagedEntryError if it is bad."""

_INTERVAL: Final = 16
"""An entry has an index if so many slots have gone by since the last one; so has every begin."""


def entry_for(state: LogState, body: Body, *, claim: int | None, nonce: str) -> Entry:
    """Make the entry that says `body` in the slot after `state`; `claim` is None for a begin."""
    slot = state.tail + 1
    writer = slot if claim is None else claim
    after = applied(state, slot, writer, nonce, body)
    if not isinstance(body, BeginEntry) and slot - state.index < _INTERVAL:
        return Entry(claim=writer, nonce=nonce, body=body, after=_after(after))
    after = replace(after, index=slot)
    return Entry(claim=writer, nonce=nonce, body=body, after=_after(after), index=_index_of(after))


def apply(state: LogState, slot: int, entry: Entry) -> LogState:
    """Compute the state with `entry` at `slot`.

    Raises ContradictedEntryError if the entry contradicts those before it.
    """
    try:
        return _applied(state, slot, entry)
    except LogFormatError as error:
        raise ContradictedEntryError(str(error), slot) from error


def _applied(state: LogState, slot: int, entry: Entry) -> LogState:
    if slot != state.tail + 1:
        raise LogFormatError(f"slot {slot} read after slot {state.tail}")
    if isinstance(entry.body, BeginEntry) and entry.body.lost is not None:
        # A repair: its index counts, also for who had read an entry before that was damaged.
        return _repaired(state, slot, entry, entry.body.lost)
    after = applied(state, slot, entry.claim, entry.nonce, entry.body)
    index = entry.index
    after = after if index is None else replace(after, index=slot)
    if _after(after) != entry.after:
        raise LogFormatError(
            f"slot {slot} says {entry.after} after itself; the entries before it make it {_after(after)}"
        )
    if index is not None and index.base is None and index != _index_of(after):
        raise LogFormatError(f"slot {slot} has an index that the entries before it don't make")
    return after


def state_at(slot: int, read: ReadEntry) -> LogState:
    """Compute the state after the entry in `slot` from the newest index up to there.

    Args:
        slot: The slot; -1 for the state before the first entry.
        read: Reads an entry.

    Raises:
        DamagedEntryError: An entry is bad that is needed.
        LogFormatError: The entries contradict each other.

    """
    if slot < 0:
        return LogState()
    last = read(slot)
    start = last.after.index
    if not 0 <= start <= slot:
        raise LogFormatError(f"slot {slot} names slot {start} as that of its index")
    state = _from_index(start, last if start == slot else read(start), read)
    for between in range(start + 1, slot):
        state = apply(state, between, read(between))
    return state if start == slot else apply(state, slot, last)


def _from_index(slot: int, entry: Entry, read: ReadEntry) -> LogState:
    """Compute the state after the entry in `slot` from its index, and from what that goes on from."""
    chain, state = [(slot, entry)], LogState()
    while (index := entry.index) is not None and (base := index.base) is not None:
        if base.slot >= slot:
            raise LogFormatError(f"slot {slot} has an index that goes on from slot {base.slot}")
        try:
            entry = _base_entry(slot, base, read)
        except DamagedEntryError as error:
            state = _before(base, error, read)
            break
        slot = base.slot
        chain.append((slot, entry))
    for at, each in reversed(chain):
        state = _overlaid(state, at, each)
    return state


def _base_entry(slot: int, base: IndexRef, read: ReadEntry) -> Entry:
    entry = read(base.slot)
    if entry.nonce != base.nonce:
        raise DamagedEntryError(
            f"slot {base.slot} holds the entry {entry.nonce}; the index of slot {slot} goes on from {base.nonce}"
        )
    return entry


def _before(base: IndexRef, error: DamagedEntryError, read: ReadEntry) -> LogState:
    """Compute the state before a bad entry. The index that goes on from it repeats what that entry itself has changed.

    Raises the entry's error if that isn't possible, or the entry was a repair.
    """
    if base.repair:
        raise error
    try:
        return state_at(base.slot - 1, read)
    except DamagedEntryError:
        raise error from None


def _overlaid(below: LogState, slot: int, entry: Entry) -> LogState:
    """Compute the state after `entry` from its index and the state that this goes on from; a whole one from nothing."""
    index, after = entry.index, entry.after
    if index is None or after.index != slot:
        raise ContradictedEntryError(f"its index was in slot {slot}, which carries none", slot + 1)
    commits = _commits_after(below, index)
    named = {after.head, *(record.parent for record in index.commits)} - {None}
    if missing := [each for each in named if each not in commits]:
        raise LogFormatError(f"slot {slot} names commit {missing[0]}, which isn't there")
    begun = index.base is None or after.claim >= index.base.slot
    uids = {owner.uid for owner in index.owners}
    owners = [owner for uid, owner in below.owners.items() if uid not in uids]
    return LogState(
        tail=slot,
        root=after.root,
        head=after.head,
        claim=after.claim,
        index=slot,
        commits=commits,
        legacy=index.legacy,
        branching=bool(index.branching),
        owner=index.owner if begun else below.owner,
        host=index.host if begun else below.host,
        owners={owner.uid: owner for owner in (*owners, *index.owners)},
    )


def _commits_after(below: LogState, index: Index) -> dict[int, CommitRecord]:
    gone = [slot for slot in below.commits if any(span[0] <= slot <= span[-1] for span in index.gone)]
    condemned = [
        record.slot for record in index.commits if record.quarantined and record.slot in below.commits
    ]
    left = without(below, {*gone, *condemned}, below.tail).commits
    return dict(sorted({**left, **{record.slot: record for record in index.commits}}.items()))


def _index_of(state: LogState) -> Index:
    return Index(
        commits=tuple(state.commits.values()),
        owners=tuple(state.owners.values()),
        owner=state.owner,
        host=state.host,
        legacy=state.legacy,
        branching=state.branching or None,
    )


def _after(state: LogState) -> StateAfter:
    if state.root is None or state.claim is None:
        raise LogFormatError("the first entry of a log is a begin")
    return StateAfter(root=state.root, claim=state.claim, index=state.index, head=state.head)


def _repaired(state: LogState, slot: int, entry: Entry, lost: tuple[int, ...]) -> LogState:
    # The root's name is the nonce of slot 0. If nothing that names it could be read, it got another one.
    if state.root is not None and entry.after.root != state.root and 0 not in lost:
        raise LogFormatError(f"slot {slot} repairs the root {entry.after.root}, but this is {state.root}")
    return _overlaid(LogState(), slot, entry)
