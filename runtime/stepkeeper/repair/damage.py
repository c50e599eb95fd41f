"""Read a log that has damaged or missing entries."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from stepkeeper.checkpoint.manifest import claim_of, manifest_name, sizes_by_folder
from stepkeeper.errors import DamagedEntryError, LogFormatError, MissingObjectError, TransientStorageError
from stepkeeper.log import BeginEntry, CommitEntry, Entry, LogState, VoidEntry
from stepkeeper.log.replay import state_at
from stepkeeper.log.tail import LOG_PREFIX, listed_slots, read_entry, slot_path
from stepkeeper.repair.rebuild import find_contradiction
from stepkeeper.storage import Store
from stepkeeper.storage.retry import Patience

__all__ = ["DamagedLog"]

_THREADS: Final = 16

_REACH: Final = 100_000
"""How far after the last slot a save's claim may be. A folder of a later claim isn't this root's."""


class DamagedLog:
    """A log as stored, read from the newest index that a reader could open it from."""

    def __init__(self, store: Store, patience: Patience) -> None:
        self._store, self._patience = store, patience
        self._found: dict[int, Entry | str] = {}
        """The entry, or the fault, of each slot that was read."""

        self._listed = frozenset(listed_slots(patience.retry(lambda: store.list(LOG_PREFIX))))
        self.tail = max(self._listed, default=-1)
        sizes = sizes_by_folder(patience.retry(lambda: store.list("")))
        self.sizes = {
            folder: found for folder, found in sizes.items() if claim_of(folder) <= self.tail + _REACH
        }
        """The sizes of the objects of each save's folder, listed after the log."""
        # A finished save proves that its claim's slot existed, even if the log ends before it now.
        self._claims = {claim_of(folder) for folder, found in self.sizes.items() if manifest_name(0) in found}
        self._end = 1 + max([self.tail, *self._claims])
        self.gone = tuple(slot for slot in range(self.tail + 1) if slot not in self._listed)
        self._read()
        while (found := find_contradiction(self.start, self.entries)) is not None:
            # The writer of `slot` had read another entry before it: the present one is wrong.
            slot, fault = found
            other = max(slot - 1, 0)
            self._found[other] = f"{self._where(other)} isn't the entry that slot {slot} follows: {fault}"
            self._read()

    def _read(self) -> None:
        self.start = self._find_start()
        """The state after the newest index; of an empty log if there is none."""
        after = range(self.start.tail + 1, self._end)
        found = {slot: self._entry(slot) for slot in after}
        self.entries = {slot: None if isinstance(each, str) else each for slot, each in found.items()}
        """The entries after it; None for one that can't be read."""
        gone = {slot: self._entry(slot) for slot in self.gone}
        self.faults = {slot: each for slot, each in sorted((gone | found).items()) if isinstance(each, str)}

    def _find_start(self) -> LogState:
        """Compute the state after the newest index, if all that it needs can be read."""
        for slot in range(self.tail, -1, -1):
            entry = self._entry(slot)
            if not isinstance(entry, str) and entry.index is not None:
                try:
                    return state_at(slot, self._needed)
                except LogFormatError:
                    continue
        return LogState()

    def _needed(self, slot: int) -> Entry:
        entry = self._entry(slot)
        if isinstance(entry, str):
            raise DamagedEntryError(entry)
        return entry

    @property
    def claims(self) -> set[int]:
        """The slots that are known to be claims."""
        found = {entry.claim for entry in self.entries.values() if entry is not None} | self._claims
        return found if self.start.claim is None else found | {self.start.claim}

    def read_older(self) -> tuple[set[str | None], list[int]]:
        """Read also the older entries of the newest index's claim.

        Returns the folders that entries name, and the slots of those older entries that can't be read.
        """
        older = range((self.start.claim or 0) + 1, self.start.tail + 1)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="stepkeeper-log") as threads:
            found = dict(zip(older, threads.map(self._read_slot, older), strict=True))
        named = {_folder_in(entry) for entry in (*found.values(), *self.entries.values())} - {None}
        return named, [slot for slot, entry in found.items() if isinstance(entry, str)]

    def last_begin(self, state: LogState) -> BeginEntry | None:
        """Return the begin of the last claim, if it can be read."""
        if state.claim is None or isinstance(entry := self._entry(state.claim), str):
            return None
        return entry.body if isinstance(entry.body, BeginEntry) else None

    def _entry(self, slot: int) -> Entry | str:
        """Read the slot's entry once; return its fault if it can't be read."""
        if slot not in self._found:
            self._found[slot] = self._read_slot(slot)
        return self._found[slot]

    def _read_slot(self, slot: int) -> Entry | str:
        return self._patience.retry(partial(self._try_slot, slot))

    def _try_slot(self, slot: int) -> Entry | str:
        try:
            return read_entry(self._store, slot)
        except DamagedEntryError as error:
            # The cause has the fault without advice.
            return str(error.__cause__ or error)
        except MissingObjectError as error:
            if slot in self._listed:
                raise TransientStorageError(f"{self._where(slot)} is listed, but isn't found") from error
            later = "later slots exist" if slot < self.tail else "a save of its claim or a later one exists"
            return f"{self._where(slot)} is gone, but {later}"

    def _where(self, slot: int) -> str:
        return f"{self._store.uri}/{slot_path(slot)}"


def _folder_in(found: Entry | str | None) -> str | None:
    """Return the folder of the save that this entry names; None if it names none, or can't be read."""
    body = found.body if isinstance(found, Entry) else None
    return body.folder if isinstance(body, CommitEntry | VoidEntry) else None
