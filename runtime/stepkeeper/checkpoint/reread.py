"""Read bad bytes again, to find out whether the store itself holds bad bytes."""

from collections.abc import Callable
from typing import Final

from stepkeeper.errors import BadBytes, MissingObjectError, TornCheckpointError, TransientStorageError
from stepkeeper.storage.base import CopiedStore, Store
from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["read_if_present", "read_until_good", "reread_bad_bytes"]

_READS: Final = 3
"""The first read and two more: bytes that were corrupted in transit are intact in the store."""


def reread_bad_bytes(store: Store, bad: BadBytes) -> str | None:
    """Read the bytes once more. Return None if they are right, else the fault. Raises StorageError."""
    # Of a whole object, read all: it may have become longer.
    length = None if bad.block is None else bad.length_bytes
    data = DEFAULT_PATIENCE.retry(lambda: read_if_present(store, bad.path, bad.offset_bytes, length))
    if data is None:
        return "it is missing"
    if len(data) != bad.length_bytes:
        return f"it has {len(data)} bytes, not {bad.length_bytes}"
    found = crc32c(data)
    return None if found == bad.crc32c else f"crc32c {found:08x}, not {bad.crc32c:08x}"


def read_if_present(store: Store, path: str, offset: int = 0, length: int | None = None) -> bytes | None:
    """Read bytes of an object; None if there is none. Raises TransientStorageError if it is listed only."""
    try:
        return store.read(path, offset, length)
    except MissingObjectError as error:
        if any(stat.path == path for stat in store.list(path)):
            raise TransientStorageError(f"{store.uri}/{path} is listed, but isn't found") from error
        return None


def read_until_good(
    store: Store,
    path: str,
    read: Callable[[], bytes | None],
    bad: Callable[[bytes], tuple[str, BadBytes] | None],
    *,
    missing: BadBytes,
    patience: Patience,
) -> bytes:
    """Read bytes until `bad` finds no fault in them.

    Args:
        store: The store that is read.
        path: The object.
        read: Reads the bytes; None if the object doesn't exist.
        bad: Describes the fault and returns which bytes are bad; None if there is no fault.
        missing: The bytes to report as bad if there is no object.
        patience: How long to retry requests to the store.

    Raises:
        TornCheckpointError: The bytes were bad in every read, or there is no object.
    """
    where = f"{store.uri}/{path}"
    n_left = _READS
    while n_left:
        data = patience.retry(read)
        if data is None:
            raise TornCheckpointError(f"{where} is missing", missing, missing=True)
        complaint = bad(data)
        if complaint is None:
            return data
        found, bytes_found = complaint
        was_copy = isinstance(store, CopiedStore) and store.distrust(path)
        # A bad copy proves nothing about the store: the read of one doesn't count.
        n_left -= 0 if was_copy else 1
    raise TornCheckpointError(f"{where} is not what was written: {found} (read {_READS} times)", bytes_found)
