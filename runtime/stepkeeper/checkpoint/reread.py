"""Read again exactly those bytes that another process read bad."""

from stepkeeper.errors import BadBytes, MissingObjectError, TransientStorageError
from stepkeeper.storage.base import Store
from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.retry import DEFAULT_PATIENCE

__all__ = ["read_there", "still_bad"]


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
