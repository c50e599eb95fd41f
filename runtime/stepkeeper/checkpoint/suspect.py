"""Bytes that somebody read bad: which they are, so that another can read exactly them."""

from collections.abc import Callable
from dataclasses import dataclass

from stepkeeper.errors import MissingObjectError, TransientStorageError
from stepkeeper.storage.base import Store
from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["BadBytes", "read_there", "still_bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadBytes:
    """What was to be read, and wasn't what was written; or wasn't there."""

    path: str
    """The object, relative to the root."""

    offset_bytes: int = 0
    length_bytes: int
    crc32c: int | None = None
    """Of these bytes as they were written. None: the one who reads them tells by their form."""

    block: int | None = None
    """Their number in the object. None: the object as a whole, which has no other bytes."""


def still_bad(
    store: Store,
    bad: BadBytes,
    *,
    check: Callable[[bytes], str | None] | None = None,
    patience: Patience = DEFAULT_PATIENCE,
) -> str | None:
    """Read once more: None if these bytes are right, else what is wrong with them. `check` tells by their form.

    Raises StorageError: no answer says nothing.
    """
    whole = bad.block is None and bad.crc32c is not None
    data = patience.retry(
        lambda: read_there(store, bad.path, bad.offset_bytes, None if whole else bad.length_bytes)
    )
    if data is None:
        return "it is missing"
    if len(data) != bad.length_bytes:
        return f"it has {len(data)} bytes there, not {bad.length_bytes}"
    if bad.crc32c is not None and (found := crc32c(data)) != bad.crc32c:
        return f"crc32c {found:08x}, not {bad.crc32c:08x}"
    return None if check is None else check(data)


def read_there(store: Store, path: str, offset: int = 0, length: int | None = None) -> bytes | None:
    """None if the object isn't there, and isn't listed either. Raises TransientStorageError if the two disagree."""
    try:
        return store.read(path, offset, length)
    except MissingObjectError as error:
        if any(stat.path == path for stat in store.list(path)):
            raise TransientStorageError(f"{store.uri}/{path} is listed, but isn't found") from error
        return None
