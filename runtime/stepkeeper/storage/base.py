"""What the log and the checkpoints need of a store, and nothing more."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

__all__ = [
    "LOG_PREFIX",
    "PROBE_PREFIX",
    "Buffer",
    "CopiedStore",
    "Leftover",
    "LeftoverStore",
    "ObjectStat",
    "PagedStore",
    "Store",
    "StreamedStore",
    "check_path",
    "joined_size_bytes",
]

Buffer = bytes | memoryview

LOG_PREFIX: Final = ".stepkeeper/log/"
"""Where the log is, one object for each slot."""

PROBE_PREFIX: Final = ".stepkeeper/probes/"
"""Where the objects are that prove something of a store, and are deleted at once.

Their names have the slot that was the log's next one before the proof: after a begin there or later they are over.
"""

_SEGMENT: Final = re.compile(r"[A-Za-z0-9_.=-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStat:
    path: str
    size_bytes: int
    crc32c: int | None = None
    """The server's own checksum of what it holds, where it has one."""

    time_unix_s: float | None = field(default=None, compare=False)
    """When it was put, by the store's own clock, where it says so. For people: nothing is ordered by it."""


class Store(Protocol):
    """A root: objects under '/'-separated relative paths. Every method may be called by many threads at once.

    Every method raises TransientStorageError when asking again may help, and StorageError when it won't.
    """

    @property
    def uri(self) -> str:
        """The root's normalised URI."""
        ...

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """True: `data` is the object, durably, and was put by this call. False: an object was there already.

        False may mean our own bytes, put by an earlier try that got no answer: read them to know.
        Raises TransientStorageError when it is unknown whether `data` is, or will still become, the object.
        """
        ...

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        """The object holds `parts`, joined, durably. Raises ObjectExistsError if other bytes have that name."""
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """The bytes of that range as the store holds them now; fewer, or none, where the object ends before.

        Raises MissingObjectError.
        """
        ...

    def list(self, prefix: str) -> list[ObjectStat]:
        """Every object whose path starts with `prefix`, sorted by path."""
        ...

    def delete(self, path: str) -> None:
        """There is no such object (any more)."""
        ...

    def close(self) -> None:
        """Connections are closed; the store is used no more."""
        ...


@runtime_checkable
class PagedStore(Store, Protocol):
    """A store that needn't list what sorts before a name to list what sorts after it."""

    def list_page(self, prefix: str, start: str, limit: int) -> Sequence[ObjectStat]:
        """The first `limit` objects whose path starts with `prefix` and is `start` or sorts after it.

        Fewer: there are no more.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """What a put of a process that was killed has left: no object, and listed nowhere."""

    path: str
    target: str
    """The object that it was to become."""


@runtime_checkable
class LeftoverStore(Store, Protocol):
    """A store where a put that is cut off leaves something behind."""

    def leftovers(self, prefix: str) -> Sequence[Leftover]:
        """Of puts below `prefix`, a folder, also of puts that are going on."""
        ...

    def remove_leftover(self, leftover: Leftover) -> None:
        """It is gone. A put that was going on all the same loses, or raises TransientStorageError."""
        ...


@runtime_checkable
class StreamedStore(Store, Protocol):
    """A store that gives each upload only a part of what the line has: many objects at once are fast, one is not."""

    @property
    def streams(self) -> int:
        """How many uploads at once a writer should keep up."""
        ...


@runtime_checkable
class CopiedStore(Store, Protocol):
    """A store that reads from copies where it has them: nothing that is wrong with one says anything of the object."""

    def list_copied(self, prefix: str) -> Collection[str]:
        """The paths with this prefix that there are copies of, good or bad."""
        ...

    def distrust(self, path: str) -> bool:
        """That object is read itself from here on. True: until now a copy of it was read."""
        ...


def check_path(path: str) -> str:
    """`path`, if it stays inside a root on every back end. Raises ValueError."""
    segments = path.split("/")
    if not all(
        _SEGMENT.fullmatch(s) and s not in (".", "..") and not s.startswith(".tmp-") for s in segments
    ):
        raise ValueError(f"{path!r} is no object path: segments of [A-Za-z0-9_.=-], '/' between, not '..'")
    return path


def joined_size_bytes(parts: Sequence[Buffer]) -> int:
    return sum(len(p) if isinstance(p, bytes) else p.nbytes for p in parts)
