"""The interface of a store: only what the log and the checkpoints need."""

import errno
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

__all__ = [
    "LOG_PREFIX",
    "PROBE_PREFIX",
    "Buffer",
    "CopiedStore",
    "ObjectStat",
    "PagedStore",
    "PiecewiseStore",
    "ReopenableStore",
    "Store",
    "StreamedStore",
    "check_path",
    "flat_view",
    "holds",
    "is_full",
    "joined_size_bytes",
]

Buffer = bytes | memoryview

LOG_PREFIX: Final = ".stepkeeper/log/"
"""The prefix of the log, which has one object for each slot."""

PROBE_PREFIX: Final = ".stepkeeper/probes/"
"""The prefix of objects that prove a property of a store, and are deleted at once.

Their names contain the log's next slot before the proof. After a begin at that slot or later, they are garbage.
"""

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_COMPARED_BYTES: Final = 16 * 1024 * 1024
_SEGMENT: Final = re.compile(r"[A-Za-z0-9_.=-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStat:
    """An object in a listing."""

    path: str
    size_bytes: int
    crc32c: int | None = None
    """The server's own checksum of the object, if it has one."""

    time_unix_s: float | None = field(default=None, compare=False)
    """When it was put, by the store's own clock, if the store reports it. For people: nothing is ordered by it."""


class Store(Protocol):
    """A root: objects under relative paths with '/' between segments. Many threads may call every method at once.

    Every method raises TransientStorageError if a retry may help, and StorageError if it won't.
    """

    @property
    def uri(self) -> str:
        """The root's normalized URI."""
        ...

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Put an object durably, if there is none. Return False if an object was there already.

        That may be our own bytes, put by an earlier try that got no answer: read them to know. Raises
        TransientStorageError if it is unknown whether `data` is, or will still become, the object.
        """
        ...

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        """Write `parts`, joined, as the object, durably. Raises ObjectExistsError if other bytes have that name."""
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read the bytes of that range, fewer if the object ends before. Raises MissingObjectError."""
        ...

    def list(self, prefix: str) -> list[ObjectStat]:
        """List every object whose path starts with `prefix`, sorted by path."""
        ...

    def delete(self, path: str) -> None:
        """Delete the object, if it exists."""
        ...

    def close(self) -> None:
        """Close the connections. The store can't be used afterwards."""
        ...


@runtime_checkable
class PagedStore(Store, Protocol):
    """A store that can list what sorts after a name without listing what sorts before it."""

    def list_page(self, prefix: str, start: str, limit: int) -> Sequence[ObjectStat]:
        """List the first `limit` objects with this prefix from `start` on. Fewer: there are no more."""
        ...


@runtime_checkable
class ReopenableStore(Store, Protocol):
    """A store whose root can be opened again, so that a read doesn't share the connection of an earlier one."""

    def reopen(self) -> Store:
        """Open the same root over new connections. The caller closes it."""
        ...


@runtime_checkable
class StreamedStore(Store, Protocol):
    """A store that limits the bandwidth of each upload: many parallel uploads are fast, a single one is not."""

    @property
    def streams(self) -> int:
        """The number of uploads that a writer should run in parallel."""
        ...


@runtime_checkable
class PiecewiseStore(Store, Protocol):
    """A store that gives the first bytes of a range early: small pieces cost it no more than the whole."""

    def read_pieces(self, path: str, offset: int, length: int, piece_bytes: int) -> Iterator[bytes]:
        """Read the bytes of that range, in order. The last piece may be shorter. Raises as `read`."""
        ...


@runtime_checkable
class CopiedStore(Store, Protocol):
    """A store that reads from copies if it has them. A fault in a copy isn't a fault of the object."""

    def list_copied(self, prefix: str) -> Collection[str]:
        """List the paths with this prefix that there are copies of, good or bad."""
        ...

    def distrust(self, path: str) -> bool:
        """Stop using copies of the object. Returns True if a copy was used until now."""
        ...


def check_path(path: str) -> str:
    """Return `path` if on every back end it stays inside a root, and is no temporary file. Raises ValueError."""
    segments = path.split("/")
    if not all(
        _SEGMENT.fullmatch(s) and s not in (".", "..") and not s.startswith(".tmp-") for s in segments
    ):
        raise ValueError(
            f"{path!r} is no object path: write segments of [A-Za-z0-9_.=-] with '/' between, and no '..'"
        )
    return path


def is_full(error: BaseException) -> bool:
    """Return True if a store refused for lack of space."""
    cause = error.__cause__
    return any(isinstance(each, OSError) and each.errno in _NO_ROOM for each in (error, cause))


def flat_view(part: Buffer) -> memoryview:
    """View the part as bytes, even if it is empty."""
    return memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")


def holds(read: Callable[[int, int], bytes | memoryview], parts: Sequence[Buffer], size_bytes: int) -> bool:
    """Return True if an object of that size equals `parts`, joined. `read` takes an offset and a number of bytes."""
    offset = 0
    for view in map(flat_view, parts):
        for first in range(0, view.nbytes, _COMPARED_BYTES):
            expected = view[first : first + _COMPARED_BYTES]
            if read(offset + first, expected.nbytes) != expected:
                return False
        offset += view.nbytes
    return offset == size_bytes


def joined_size_bytes(parts: Sequence[Buffer]) -> int:
    return sum(len(p) if isinstance(p, bytes) else p.nbytes for p in parts)
