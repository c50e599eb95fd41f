"""Read ahead in several threads, as far as there is memory for, and use what was read in order."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import chain
from typing import Final, Protocol, TypeVar

from stepkeeper.coordination.waits import Waits
from stepkeeper.restore.threads import ReadingThreads

__all__ = ["Sized", "read_ahead"]

_READ_AHEAD_BYTES: Final = 1 << 30
"""The host memory for tensors that are being read or filled. A tensor that needs more is read alone."""

_THREADS: Final = 8


class Sized(Protocol):
    """Something that can be read."""

    @property
    def size_bytes(self) -> int:
        """The host memory that it takes while it is read and filled."""
        ...


Load = TypeVar("Load", bound=Sized)
Read = TypeVar("Read")


def read_ahead(
    loads: Iterator[Load],
    read: Callable[[Load], Read],
    fill: Callable[[Load, Read], None],
    *,
    waits: Waits | None = None,
) -> None:
    """Read loads in several threads, and fill them one after another in their order.

    As many loads are read ahead as there is memory for.

    Args:
        loads: What to read, in order.
        read: Reads one load, in any thread.
        fill: Called in this thread with a load and what `read` returned.
        waits: Ends the wait for what is read.

    """
    waiting: deque[tuple[Load, Future[Read]]] = deque()
    held_bytes = 0
    with ReadingThreads(_THREADS, waits or Waits(), name="restore") as threads:
        for load in chain(loads, (None,)):
            while waiting and (load is None or held_bytes + load.size_bytes > _READ_AHEAD_BYTES):
                first, found = waiting.popleft()
                fill(first, threads.await_result(found))
                del found
                held_bytes -= first.size_bytes
            if load is not None:
                waiting.append((load, threads.submit(read, load)))
                held_bytes += load.size_bytes
