"""Read every slot of a log, and tell which entries are damaged or gone."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from stepkeeper.errors import DamagedEntryError, MissingObjectError, TransientStorageError
from stepkeeper.log.entries import Entry
from stepkeeper.log.reading import read_entry
from stepkeeper.log.tail import LOG_PREFIX, listed_slots, slot_path
from stepkeeper.repair.evidence import named_folders
from stepkeeper.repair.intruders import find_intruder
from stepkeeper.storage import Store
from stepkeeper.storage.retry import Patience

__all__ = ["ReadLog", "read_log"]

_THREADS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLog:
    """A log as it is in the store."""

    entries: tuple[Entry | None, ...]
    """The entries by slot; None for one that is damaged or gone. Indexes that a newer one stands for are left out."""

    faults: Mapping[int, str]
    """What is wrong with each slot that can't be read."""

    gone: tuple[int, ...]
    """Those slots that are empty though later ones aren't."""

    folders: frozenset[str]
    """The folders of all saves that an entry or an index tells of."""


def read_log(store: Store, patience: Patience) -> ReadLog:
    """Read every slot of the log. An entry that came into a slot whose own was gone counts as damaged.

    Args:
        store: The root's store.
        patience: How long to retry while the store doesn't answer.

    Raises:
        LogFormatError: A newer release has written an entry: only that one may judge this log.
        StorageError: The store gave no answer, or refused.

    """
    intruders = dict[int, str]()
    while True:
        found = _read_slots(store, patience, intruders)
        slot = find_intruder(found.entries)
        if slot is None:
            return found
        intruders[slot] = (
            f"{store.uri}/{slot_path(slot)} isn't the entry that those behind it go on from: that one was removed, and "
            "this one took its place"
        )


def _read_slots(store: Store, patience: Patience, intruders: Mapping[int, str]) -> ReadLog:
    """Read every slot of the log but those that are known not to hold their own entry."""
    listed = listed_slots(patience.retry(lambda: store.list(LOG_PREFIX)))
    tail = max(listed, default=-1)
    read = partial(_read_slot, store, patience, frozenset(listed))
    entries: list[Entry | None] = []
    faults: dict[int, str] = {}
    folders: set[str] = set()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="stepkeeper-log") as threads:
        for slot, found in enumerate(threads.map(read, range(tail + 1))):
            found = intruders.get(slot, found)  # noqa: PLW2901 — that is what the slot tells
            if isinstance(found, str):
                faults[slot] = found
                entries.append(None)
                continue
            folders |= named_folders(found)
            if found.index is not None:
                _drop_indexes(entries, 0 if found.index.base is None else found.index.base.slot + 1)
            entries.append(found)
    gone = tuple(slot for slot in faults if slot not in listed)
    return ReadLog(entries=tuple(entries), faults=faults, gone=gone, folders=frozenset(folders))


def _read_slot(store: Store, patience: Patience, listed: frozenset[int], slot: int) -> Entry | str:
    """Read the slot's entry; return what is wrong with it if it can't be read."""
    path = slot_path(slot)

    def read() -> Entry | str:
        try:
            return read_entry(store, slot)
        except DamagedEntryError as error:
            return str(error.__cause__ or error)
        except MissingObjectError as error:
            if slot in listed:
                raise TransientStorageError(f"{store.uri}/{path} is listed, but isn't found") from error
            return f"{store.uri}/{path} is gone, later slots are there"

    return patience.retry(read)


def _drop_indexes(entries: list[Entry | None], since: int) -> None:
    """Forget the indexes from `since` on, which a newer one stands for: an old log has very many."""
    for slot, entry in enumerate(entries[since:], since):
        if entry is not None and entry.index is not None:
            entries[slot] = replace(entry, index=None)
