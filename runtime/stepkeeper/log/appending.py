"""Read the entries of a log from a store, and append to it so that each slot gets one entry."""

from collections.abc import Callable
from dataclasses import dataclass

from stepkeeper.errors import (
    ContradictedEntryError,
    DamagedEntryError,
    MissingObjectError,
    StorageError,
    TransientStorageError,
    UnknownOutcomeError,
)
from stepkeeper.log.claims import Claim, check_claim
from stepkeeper.log.entries import Body, Entry, new_nonce
from stepkeeper.log.records import CommitRecord
from stepkeeper.log.replay import apply_entry, entry_for, state_at
from stepkeeper.log.state import LogState
from stepkeeper.log.tail import find_tail, gap_at, read_entry, slot_path
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["Appender", "Build", "PendingAppend"]

Build = Callable[[LogState], Body | None]
"""Returns the body to append after a state; None if there is nothing left to append.

Raises if it is no longer allowed.
"""


@dataclass(slots=True, kw_only=True)
class PendingAppend:
    """An append under way."""

    claim: Claim | None
    """The claim under which the entry is written. None: the entry is a begin."""

    build: Build
    nonce: str | None = None
    """The nonce of the entry, if the caller has chosen it."""

    unknown: bool = False
    """True if an entry of this append may be in the slot after the tail, or may still arrive there."""

    entry: Entry | None = None
    """The entry that was put at tail + 1 without an answer. The slot may be empty now and hold it later."""


class Appender:
    """Read a log's entries in order, and append to them. One thread at a time may use it."""

    def __init__(self, store: Store, *, patience: Patience = DEFAULT_PATIENCE) -> None:
        """Use the log in `store`. Nothing is read yet."""
        self._store = store
        self._patience = patience
        self._state = LogState()
        self._pending: PendingAppend | None = None

    @property
    def state(self) -> LogState:
        """The state as of the last call."""
        return self._state

    def open(self) -> LogState:
        """Read the state at the tail from few entries, even of a long log.

        Raises LogGapError, LogFormatError and StorageError.
        """
        self.settle()
        self._state = self._read_from_tail()
        return self._read_new_entries()

    def refresh(self) -> LogState:
        """Read what was appended since the last call, and return the state. If nothing was, this is one read."""
        if self._state.tail < 0:
            return self.open()
        self.settle()
        try:
            return self._read_new_entries()
        except DamagedEntryError:
            # A repair may have followed, whose entry replaces this one.
            self._state = self._read_from_tail()
            return self._read_new_entries()

    def _read_from_tail(self) -> LogState:
        try:
            return state_at(find_tail(self._store, self._patience), self._existing_entry)
        except DamagedEntryError as error:
            raise self._locate(error) from error

    def _existing_entry(self, slot: int) -> Entry:
        """Read an entry that must exist, because later ones do."""
        try:
            return self.entry(slot)
        except MissingObjectError:
            raise gap_at(self._store, slot) from None

    def _read_new_entries(self) -> LogState:
        while True:
            try:
                entry = self.entry(self._state.tail + 1)
            except MissingObjectError:
                return self._state
            self._state = self._apply(entry)

    def _apply(self, entry: Entry) -> LogState:
        try:
            return apply_entry(self._state, self._state.tail + 1, entry)
        except DamagedEntryError as error:
            raise self._locate(error) from error

    def _locate(self, error: DamagedEntryError) -> DamagedEntryError:
        """Add the object and advice to the error of an entry that contradicts earlier ones."""
        if not isinstance(error, ContradictedEntryError):
            return error
        root, slot = self._store.uri.rstrip("/"), error.slot - 1
        return DamagedEntryError(
            f"{self._store.uri}/{slot_path(slot)}: slot {slot} of the log of {root} isn't the entry that slot "
            f"{error.slot} follows ({error}): its entry was removed, and another took its place. Put the object "
            f"back from object versions or a copy; without one, see what can be rebuilt: stepkeeper repair {root}"
        )

    def entry(self, slot: int) -> Entry:
        """Read the entry in `slot`. Raises MissingObjectError if there is none, DamagedEntryError if it is bad."""
        return self._patience.retry(lambda: read_entry(self._store, slot))

    def settle(self) -> CommitRecord | None:
        """Finish the append whose put got no answer; return its commit if it is one. Raises as the append did."""
        if self._pending is None or self._run(self._pending) is None:
            return None
        return self._state.commits.get(self._state.tail)

    def _append(self, claim: Claim | None, build: Build, nonce: str | None = None) -> Entry | None:
        """Append the entry that `build` returns, and return it. If `build` returns None, nothing is appended."""
        self.settle()
        return self._run(PendingAppend(claim=claim, build=build, nonce=nonce))

    def _run(self, append: PendingAppend) -> Entry | None:
        """Put the append's entry into the first slot that no other entry gets, and return it."""
        while True:
            if append.entry is None:
                if append.claim is not None:
                    check_claim(self._state, append.claim)
                body = append.build(self._state)
                if body is None:
                    return None
                claim = None if append.claim is None else append.claim.slot
                append.entry = entry_for(self._state, body, claim=claim, nonce=append.nonce or new_nonce())
            winner, mine = self._place_or_reopen(append), append.entry.nonce
            # If it didn't win, the next try builds another entry: the state has changed.
            append.entry = None
            if winner is None:
                continue
            self._state = self._apply(winner)
            if winner.nonce == mine:
                return winner

    def _place_or_reopen(self, append: PendingAppend) -> Entry | None:
        """Place the append's entry. None: its slot is damaged, but the log was repaired and is open again."""
        try:
            return self._place(append)
        except DamagedEntryError:
            self._state = self._read_from_tail()
            # The repair's entry replaces all before it: a put of this append without an answer no longer counts.
            append.unknown, self._pending = False, None
            return None

    def _place(self, append: PendingAppend) -> Entry:
        """Put the append's entry into the slot after the tail, and return what the slot holds then."""
        assert append.entry is not None
        slot, data = self._state.tail + 1, append.entry.to_json()
        self._pending = append
        pauses_s = self._patience.pauses_s()
        while True:
            try:
                won = self._store.put_if_absent(slot_path(slot), data)
                winner = append.entry if won else read_entry(self._store, slot)
                append.unknown, self._pending = False, None
                return winner
            except (TransientStorageError, MissingObjectError) as error:
                # A put that found an entry, and a read that doesn't, prove nothing: our put may still fill the slot.
                append.unknown, cause = True, error
            except StorageError as error:
                if not append.unknown:
                    # Every put was answered: none can still arrive.
                    self._pending = None
                    raise
                raise self._unknown_outcome(slot) from error
            pause_s = next(pauses_s, None)
            if pause_s is None:
                raise self._unknown_outcome(slot) from cause
            self._patience.sleep(pause_s)

    def _unknown_outcome(self, slot: int) -> UnknownOutcomeError:
        return UnknownOutcomeError(
            f"{self._store.uri}/{slot_path(slot)}: no answer; the entry may be in the log, or may still arrive"
        )
