"""Bytes that somebody read bad: which they are, so that another can read exactly them."""

from dataclasses import dataclass

from stepkeeper.errors import MissingObjectError, TransientStorageError
from stepkeeper.storage.base import Store
from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["BadBytes", "BadItem", "read_there", "still_bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadBytes:
    """What was to be read, and wasn't what was written; or wasn't there."""

    path: str
    """The object, relative to the root."""

    length_bytes: int
    crc32c: int
    """Of these bytes as they were written."""

    offset_bytes: int = 0
    block: int | None = None
    """Their number in the object. None: the object as a whole, which has no other bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadItem:
    """A part of another writer's checkpoint: who reads it tells by its form."""

    folder: str
    name: str
    chunk: int | None = None
    """Of a tensor."""


def still_bad(store: Store, bad: BadBytes, *, patience: Patience = DEFAULT_PATIENCE) -> str | None:
    """Read once more: None if these bytes are right, else what is wrong with them.

    Raises StorageError: no answer says nothing.
    """
    length = None if bad.block is None else bad.length_bytes
    data = patience.retry(lambda: read_there(store, bad.path, bad.offset_bytes, length))
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
