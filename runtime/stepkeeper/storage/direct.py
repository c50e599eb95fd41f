"""Bypass the page cache in large writes, if the file system supports that.

A large object written through the cache takes memory that counts as the pod's, and displaces data that training
reads. The kernel spends more CPU time on that than all of stepkeeper uses.
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
"""Minimum size of an object to write directly; a smaller one costs little either way."""

_AT_ONCE_BYTES: Final = 1024 * 1024
_BLOCK_BYTES: Final = 4096
"""The alignment of direct writes, in the file and in memory.

No disk has blocks larger than a page.
"""


def write_past_cache(descriptor: int, parts: Sequence[Buffer]) -> bool:
    """Write `parts`, joined, into a new file, not yet durably. Return False if that isn't possible or useful.

    Direct writes need aligned memory, so the parts are collected in an aligned buffer.
    """
    if joined_size_bytes(parts) < _LEAST_BYTES or not _switch(descriptor, on=True):
        return False
    buffer = memoryview(mmap.mmap(-1, _AT_ONCE_BYTES))
    for filled in _fill_repeatedly(parts, buffer):
        whole = filled // _BLOCK_BYTES * _BLOCK_BYTES
        _write(descriptor, buffer[:whole])
        if whole < filled:  # the file's last bytes, less than a block
            _switch(descriptor, on=False)
            _write(descriptor, buffer[whole:filled])
    return True


def _fill_repeatedly(parts: Sequence[Buffer], buffer: memoryview) -> Iterator[int]:
    """Fill `buffer` repeatedly, and yield how many of its bytes are filled: all, except at the last time."""
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
    """Write all of the data; through the cache once direct writes are refused."""
    while data.nbytes:
        try:
            written = os.writev(descriptor, [data])
        except OSError as error:
            # Some file systems refuse direct writes only here, or need a larger alignment.
            if error.errno != errno.EINVAL or not _is_on(descriptor):
                raise
            _switch(descriptor, on=False)
            continue
        moved.note(written)
        if written % _BLOCK_BYTES:
            # The rest of the file isn't aligned.
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
