"""Replay the log: entry by entry, or from the indexes that its end stands on. Pure but for the reading."""

from collections.abc import Callable, Collection
from dataclasses import replace

from stepkeeper.errors import ContradictedEntryError, DamagedEntryError, LogFormatError
from stepkeeper.log.entries import BeginEntry, Body, DeleteEntry, Entry, QuarantineEntry
from stepkeeper.log.indexes import folded, is_indexed, named_in, noted, standing_on, with_index
from stepkeeper.log.records import Index, IndexRef, StateAfter
from stepkeeper.log.state import LogState, applied

__all__ = ["ReadEntry", "apply", "entry_for", "state_at"]

ReadEntry = Callable[[int], Entry]
"""Reads the entry in a slot. Raises DamagedEntryError if it is bad."""


def entry_for(state: LogState, body: Body, *, claim: int | None, nonce: str) -> Entry:
    """Make the entry that says `body` in the slot after `state`; `claim` is None for a begin."""
    slot = state.tail + 1
    writer = slot if claim is None else claim
    after, index = _advanced(state, slot, writer, nonce, body)
    return Entry(claim=writer, nonce=nonce, body=body, after=_after(after), index=index)


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
        # A repair: what it could prove counts, also for who had read an entry before it was damaged.
        return _repaired(state, slot, entry, entry.body.lost)
    after, index = _advanced(state, slot, entry.claim, entry.nonce, entry.body)
    if _after(after) != entry.after or index != entry.index:
        raise LogFormatError(
            f"slot {slot} says {entry.after} after itself; the entries before it make it {_after(after)}"
        )
    return after


def state_at(slot: int, read: ReadEntry, *, damaged: Callable[[DamagedEntryError], None]) -> LogState:
    """Compute the state after the entry in `slot` from the newest index up to there, and what that goes on from.

    An index further down that is bad needn't be read: the entry before it stands in for it.

    Args:
        slot: The slot; -1 for the state before the first entry.
        read: Reads an entry.
        damaged: Told of each entry that was bad and isn't needed.

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
    state = _from_indexes(start, last if start == slot else read(start), read, damaged)
    for between in range(start + 1, slot):
        state = apply(state, between, read(between))
    return state if start == slot else apply(state, slot, last)


def _from_indexes(
    slot: int, entry: Entry, read: ReadEntry, damaged: Callable[[DamagedEntryError], None]
) -> LogState:
    chain = [(slot, entry)]
    state, stands_in = LogState(), False
    while (index := entry.index) is not None and (base := index.base) is not None:
        if base.slot >= slot:
            raise LogFormatError(f"slot {slot} has an index that goes on from slot {base.slot}")
        try:
            entry = _base_entry(slot, base, read)
        except DamagedEntryError as error:
            state, stands_in = _stand_in(base, error, read, damaged), True
            break
        slot = base.slot
        chain.append((slot, entry))
    for at, each in reversed(chain):
        state, stands_in = folded(state, at, each, stands_in=stands_in), False
    return state


def _base_entry(slot: int, base: IndexRef, read: ReadEntry) -> Entry:
    entry = read(base.slot)
    if entry.nonce != base.nonce:
        raise DamagedEntryError(
            f"slot {base.slot} holds the entry {entry.nonce}; the index of slot {slot} goes on from {base.nonce}"
        )
    return entry


def _stand_in(
    base: IndexRef,
    error: DamagedEntryError,
    read: ReadEntry,
    damaged: Callable[[DamagedEntryError], None],
) -> LogState:
    """Compute what the bad entry at `base` went on from. Raises its error if that isn't possible either."""
    if base.repair:
        raise error
    try:
        state = state_at(base.slot - 1, read, damaged=damaged)
    except DamagedEntryError:
        raise error from None
    damaged(error)
    return standing_on(state, base)


def _advanced(
    state: LogState, slot: int, claim: int, nonce: str, body: Body
) -> tuple[LogState, Index | None]:
    after = applied(state, slot, claim, nonce, body)
    commits, owners = named_in(slot, body)
    if isinstance(body, DeleteEntry | QuarantineEntry):
        commits = _changed(state, after)
    after = replace(after, chain=noted(state.chain, commits, owners))
    return with_index(after, slot, nonce, body) if is_indexed(slot, body) else (after, None)


def _changed(before: LogState, after: LogState) -> Collection[int]:
    """Find the commits that went, or are others than before."""
    return [slot for slot, record in before.commits.items() if after.commits.get(slot) is not record]


def _after(state: LogState) -> StateAfter:
    if state.root is None or state.claim is None:
        raise LogFormatError("the first entry of a log is a begin")
    return StateAfter(root=state.root, claim=state.claim, index=state.index, head=state.head)


def _repaired(state: LogState, slot: int, entry: Entry, lost: Collection[int]) -> LogState:
    # The root's name is the nonce of slot 0. If nothing that names it could be read, it got another one.
    if state.root is not None and entry.after.root != state.root and 0 not in lost:
        raise LogFormatError(f"slot {slot} repairs the root {entry.after.root}, but this is {state.root}")
    return folded(LogState(), slot, entry)
