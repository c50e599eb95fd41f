"""Write past the page cache, if the file system can.

A large object that goes through the cache is copied into memory that is counted with the pod's, and displaces
what the training reads. The kernel's work for that takes more of a processor than all of ours.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Final

from stepkeeper.storage.base import Buffer, flat_view, joined_size_bytes
from stepkeeper.storage.moved import moved

__all__ = ["write_past_cache"]

_LEAST_BYTES: Final = 1024 * 1024
"""The least size of an object that is written so; a smaller one costs little either way."""

_AT_ONCE_BYTES: Final = 1024 * 1024
_BLOCK_BYTES: Final = 4096
"""The multiple at which direct writes begin and end, in the file and in memory.

No disk has larger blocks than a page.
"""


def write_past_cache(descriptor: int, parts: Sequence[Buffer]) -> bool:
    """Write `parts`, joined, into a new file, not yet durably.

    Returns False, and writes nothing, if they are few or it can't.

    The parts lie anywhere in memory, but direct writes must not. They are put together in a buffer that is
    aligned.
    """
    if joined_size_bytes(parts) < _LEAST_BYTES or not _switch(descriptor, on=True):
        return False
    buffer = memoryview(mmap.mmap(-1, _AT_ONCE_BYTES))
    for filled in _fillings(parts, buffer):
        whole = filled // _BLOCK_BYTES * _BLOCK_BYTES
        _write(descriptor, buffer[:whole])
        if whole < filled:
            _switch(descriptor, on=False)
            _write(descriptor, buffer[whole:filled])
    return True


def _fillings(parts: Sequence[Buffer], buffer: memoryview) -> Iterator[int]:
    """Fill `buffer` again and again, and yield how many of its bytes are filled: all, but for the last time."""
    filled = 0
    for part in parts:
        rest = flat_view(part)
        while rest.nbytes:
            taken = min(rest.nbytes, buffer.nbytes - filled)
            buffer[filled : filled + taken] = rest[:taken]
            rest, filled = rest[taken:], filled + taken
            if filled == buffer.nbytes:
                yield filled
                filled = 0
    if filled:
        yield filled


def _write(descriptor: int, data: memoryview) -> None:
    """Write all of the data; from where direct writes are refused, through the cache."""
    while data.nbytes:
        try:
            written = os.writev(descriptor, [data])
        except OSError as error:
            # A file system may refuse direct writes as late as this, or want them larger.
            if error.errno != errno.EINVAL or not _is_on(descriptor):
                raise
            _switch(descriptor, on=False)
            continue
        moved.note(written)
        if written % _BLOCK_BYTES:
            _switch(descriptor, on=False)
        data = data[written:]


def _is_on(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _switch(descriptor: int, *, on: bool) -> bool:
    """Switch direct writes on or off. Returns False if that isn't possible."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if on else 0))
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    return True
