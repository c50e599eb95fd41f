"""Count the bytes that this process has moved to stores, to distinguish slow from stuck."""

import mmap
import os
import struct
import threading
from typing import Final, final

from stepkeeper.fork_guard import MemoryFile

__all__ = ["MovedBytes", "create_counter", "moved", "read_counter"]

_COUNT: Final = struct.Struct("<Q")


@final
class MovedBytes:
    """Count bytes, also in memory that another process reads. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_bytes = 0
        self._shared: mmap.mmap | None = None

    @property
    def n_bytes(self) -> int:
        """The count so far. It never decreases."""
        return self._n_bytes

    def note(self, n_bytes: int) -> None:
        """Count bytes that a store has accepted, or any number for other work: only progress matters."""
        with self._lock:
            self._n_bytes += n_bytes
            if self._shared is not None:
                _COUNT.pack_into(self._shared, 0, self._n_bytes)

    def share(self, fd: int) -> None:
        """Write the count into the memory of `fd` from now on; the caller closes `fd`."""
        shared = mmap.mmap(fd, _COUNT.size)
        with self._lock:
            self._shared = shared
            _COUNT.pack_into(shared, 0, self._n_bytes)


moved: Final = MovedBytes()


def create_counter() -> MemoryFile:
    """Create memory for a count. The caller closes it."""
    return MemoryFile("stepkeeper-moved", _COUNT.size)


def read_counter(fd: int) -> int:
    """Read the count in that memory."""
    count: int = _COUNT.unpack(os.pread(fd, _COUNT.size, 0))[0]
    return count
