"""Replay the log: entry by entry, or from the newest index. Pure but for the reading."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from stepkeeper.errors import ContradictedEntryError, LogFormatError
from stepkeeper.log.entries import BeginEntry, Body, Entry
from stepkeeper.log.records import Index, StateAfter
from stepkeeper.log.state import LogState, apply_body

__all__ = ["ReadEntry", "apply_entry", "entry_for", "state_at"]

ReadEntry = Callable[[int], Entry]
"""Reads the entry in a slot. Raises DamagedEntryError if it is bad."""

_INTERVAL: Final = 16
"""An entry has an index if this many slots have passed since the last one. Every begin has one."""


def entry_for(state: LogState, body: Body, *, claim: int | None, nonce: str) -> Entry:
    """Build the entry that holds `body` in the slot after `state`; `claim` is None for a begin."""
    slot = state.tail + 1
    writer = slot if claim is None else claim
    after = apply_body(state, slot, writer, nonce, body)
    if not isinstance(body, BeginEntry) and slot - state.index < _INTERVAL:
        return Entry(claim=writer, nonce=nonce, body=body, after=_state_after(after))
    after = replace(after, index=slot)
    return Entry(claim=writer, nonce=nonce, body=body, after=_state_after(after), index=_build_index(after))


def apply_entry(state: LogState, slot: int, entry: Entry) -> LogState:
    """Compute the state with `entry` at `slot`. Raises ContradictedEntryError if the two don't fit."""
    try:
        return _check_and_apply(state, slot, entry)
    except LogFormatError as error:
        raise ContradictedEntryError(str(error), slot) from error


def _check_and_apply(state: LogState, slot: int, entry: Entry) -> LogState:
    if slot != state.tail + 1:
        raise LogFormatError(f"slot {slot} read after slot {state.tail}")
    if isinstance(entry.body, BeginEntry) and entry.body.lost is not None:
        # A repair: its index counts, also for a reader that had read an entry before it was damaged.
        return _apply_repair(state, slot, entry, entry.body.lost)
    after = apply_body(state, slot, entry.claim, entry.nonce, entry.body)
    if (index := entry.index) is not None:
        after = replace(after, index=slot)
    if _state_after(after) != entry.after:
        raise LogFormatError(
            f"slot {slot} records the state {entry.after}; by the entries before it, it is {_state_after(after)}"
        )
    # An index that is based on another holds only changes.
    if index is not None and index.base is None and index != _build_index(after):
        raise LogFormatError(f"slot {slot} has an index that contradicts the entries before it")
    return after


def state_at(slot: int, read: ReadEntry) -> LogState:
    """Compute the state after the entry in `slot`, or -1 for none, from the newest index up to there.

    Raises DamagedEntryError if a needed entry is bad, LogFormatError if they contradict each other.
    """
    if slot < 0:
        return LogState()
    last = read(slot)
    start, entry = last.after.index, last
    if not 0 <= start <= slot:
        raise LogFormatError(f"slot {slot} names slot {start} as the slot of its index")
    if start < slot:
        entry = read(start)
    while (index := entry.index) is not None and (base := index.base) is not None:
        # Of format 2: it holds only the changes since an earlier index.
        if not 0 <= base < start:
            raise LogFormatError(f"slot {start} has an index that is based on slot {base}")
        start, entry = base, read(base)
    state = _from_index(start, entry)
    for between in range(start + 1, slot + 1):
        state = apply_entry(state, between, last if between == slot else read(between))
    return state


def _from_index(slot: int, entry: Entry) -> LogState:
    """Compute the state after the entry in `slot` from its index, which is whole."""
    index, after = entry.index, entry.after
    if index is None or after.index != slot:
        raise ContradictedEntryError(f"its index was in slot {slot}, which carries none", slot + 1)
    commits = {record.slot: record for record in index.commits}
    named = {after.head, *(record.parent for record in index.commits)} - {None}
    if missing := [each for each in named if each not in commits]:
        raise LogFormatError(f"slot {slot} names commit {missing[0]}, which doesn't exist")
    return LogState(
        tail=slot,
        root=after.root,
        head=after.head,
        claim=after.claim,
        index=slot,
        commits=commits,
        legacy=index.legacy,
        branching=bool(index.branching),
        owner=index.owner,
        host=index.host,
        owners={owner.uid: owner for owner in index.owners},
    )


def _build_index(state: LogState) -> Index:
    return Index(
        commits=tuple(state.commits.values()),
        owners=tuple(state.owners.values()),
        owner=state.owner,
        host=state.host,
        legacy=state.legacy,
        branching=state.branching or None,
    )


def _state_after(state: LogState) -> StateAfter:
    if state.root is None or state.claim is None:
        raise LogFormatError("the first entry of a log is a begin")
    return StateAfter(root=state.root, claim=state.claim, index=state.index, head=state.head)


def _apply_repair(state: LogState, slot: int, entry: Entry, lost: tuple[int, ...]) -> LogState:
    # The root's name is the nonce of slot 0. If no readable entry names it, the repair gave it another one.
    if state.root is not None and entry.after.root != state.root and 0 not in lost:
        raise LogFormatError(f"slot {slot} repairs the root {entry.after.root}, but this is {state.root}")
    return _from_index(slot, entry)
