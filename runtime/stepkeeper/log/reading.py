"""Read an entry of the log, and read it again where its bytes are bad: damage on the way is none in the store."""

from typing import Final

from stepkeeper.errors import DamagedEntryError, MissingObjectError, TransientStorageError
from stepkeeper.log.entries import Entry
from stepkeeper.log.tail import slot_path
from stepkeeper.storage.base import ReopenableStore, Store

__all__ = ["read_afresh", "read_entry"]

_FRESH_READS: Final = 2
"""The readings after a bad one, each over connections of its own if the store can open some."""


def read_entry(store: Store, slot: int) -> Entry:
    """Read the entry in `slot`. If its bytes are bad, read it twice more over fresh connections.

    Args:
        store: The root's store.
        slot: The slot to read.

    Raises:
        MissingObjectError: The slot is empty.
        DamagedEntryError: The bytes were bad in every reading.
        LogFormatError: A newer release has written the entry.
        TransientStorageError: The store gave no answer, which proves nothing.

    """
    where = f"{store.uri}/{slot_path(slot)}"
    try:
        return Entry.from_json(store.read(slot_path(slot)), where)
    except DamagedEntryError as error:
        found = error
    for _ in range(_FRESH_READS):
        try:
            return Entry.from_json(read_afresh(store, slot_path(slot)), where)
        except DamagedEntryError as error:
            found = error
        except MissingObjectError as error:
            raise TransientStorageError(f"{where} was read just now, and isn't found any more") from error
    root = store.uri.rstrip("/")
    fault = str(found).removeprefix(where).strip()
    raise DamagedEntryError(
        f"{where}: slot {slot} of the log of {root} {fault} (read {1 + _FRESH_READS} times). Put the object back from "
        f"object versions or a copy; without one, see what can be rebuilt: stepkeeper repair {root}"
    ) from found


def read_afresh(store: Store, path: str) -> bytes:
    """Read an object over connections of its own, if the store can open some."""
    if not isinstance(store, ReopenableStore):
        return store.read(path)
    fresh = store.reopen()
    try:
        return fresh.read(path)
    finally:
        fresh.close()
