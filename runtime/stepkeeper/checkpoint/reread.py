"""Read bytes again that were read bad, and tell whether the store holds them so."""

from collections.abc import Callable
from typing import Final

from stepkeeper.errors import BadBytes, MissingObjectError, TornCheckpointError, TransientStorageError
from stepkeeper.storage.base import CopiedStore, Store
from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["read_there", "read_until_good", "still_bad"]

_READS: Final = 3
"""The first and two fresh ones: bytes that went bad on the way are no bad bytes in the store."""


def still_bad(store: Store, bad: BadBytes) -> str | None:
    """Read once more: None if these bytes are right, else what is wrong with them.

    Raises StorageError: no answer says nothing.
    """
    length = None if bad.block is None else bad.length_bytes
    data = DEFAULT_PATIENCE.retry(lambda: read_there(store, bad.path, bad.offset_bytes, length))
    if data is None:
        return "it is missing"
    if len(data) != bad.length_bytes:
        return f"{len(data)} bytes are there, not {bad.length_bytes}"
    found = crc32c(data)
    return None if found == bad.crc32c else f"crc32c {found:08x}, not {bad.crc32c:08x}"


def read_there(store: Store, path: str, offset: int = 0, length: int | None = None) -> bytes | None:
    """None if the object isn't there, and isn't listed either. Raises TransientStorageError if the two disagree."""
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
    """Bytes of the object that `bad` finds nothing wrong with. Raises TornCheckpointError when it did each time.

    `missing` is what is said to be bad where there is no object.
    """
    where = f"{store.uri}/{path}"
    found, bytes_found = "", missing
    n_left = _READS
    while n_left:
        data = patience.retry(read)
        if data is None:
            raise TornCheckpointError(f"{where} is missing", missing, missing=True)
        complaint = bad(data)
        if complaint is None:
            return data
        found, bytes_found = complaint
        # A bad copy counts for nothing.
        n_left -= not (isinstance(store, CopiedStore) and store.distrust(path))
    raise TornCheckpointError(f"{where} is not what was written: {found} (read {_READS} times)", bytes_found)
