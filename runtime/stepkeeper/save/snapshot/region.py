"""Memory shared with the companion: one anonymous file, reused from save to save, grown when it has to be.

An anonymous file is bound by the pod's memory limit only; a pod's /dev/shm has 64 MB.
"""

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Final

import torch

from stepkeeper.checkpoint import TensorOrder
from stepkeeper_planners.dtypes import dtype_of

__all__ = ["ALIGNMENT_BYTES", "Region"]

ALIGNMENT_BYTES: Final = 64
"""Every piece begins at a multiple: enough for any dtype and for wide copies."""

_ROOM_PART: Final = 16
"""A region is larger than asked for by this part, so that values which grow a little don't move it. It costs nothing:
pages that nothing was written to are no memory."""

_LEAST_ROOM_BYTES: Final = 1024 * 1024
_AT_ONCE_BYTES: Final = 32 * 1024 * 1024
_MADV_POPULATE_WRITE: Final = 23


class Region:
    """A stretch of shared memory. Its pages stay with the process, so that a later save doesn't fault them in again."""

    def __init__(self) -> None:
        self._fd = -1
        self._closing: weakref.finalize[[int], Region] | None = None
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._places: tuple[Sequence[TensorOrder], list[torch.Tensor]] = ((), [])

    @property
    def fd(self) -> int:
        """From the first `reserve` on."""
        return self._fd

    @property
    def size_bytes(self) -> int:
        return self._bytes.numel()

    def reserve(self, size_bytes: int) -> None:
        """At least `size_bytes` are there. Views that were taken before are of the old memory: drop them first."""
        if size_bytes <= self.size_bytes and self._fd >= 0:
            return
        wanted = size_bytes + max(size_bytes // _ROOM_PART, _LEAST_ROOM_BYTES)
        wanted = -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._fd < 0:
            self._fd = os.memfd_create("stepkeeper-snapshot")
            # Also for a region that nobody has any more, and nobody closed.
            self._closing = weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, wanted)
        self._map = mmap.mmap(self._fd, wanted)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._places = ((), [])

    def populate(self, size_bytes: int) -> None:
        """The first `size_bytes` are in memory, if the kernel can do that (Linux 5.14); what they hold is as before.

        Called from a background thread, without the GIL for the most part. Others may use the region meanwhile.
        """
        held = self._bytes
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        end = min(size_bytes, held.numel())
        for start in range(0, end, _AT_ONCE_BYTES):
            if self._fd < 0:
                return
            length = min(_AT_ONCE_BYTES, end - start)
            if madvise(held.data_ptr() + start, length, _MADV_POPULATE_WRITE) != 0:
                return

    def tensor(self, offset: int, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
        """The tensor of this shape whose elements lie at `offset`."""
        length = math.prod(sizes) * dtype.itemsize
        return self._bytes[offset : offset + length].view(dtype).view(tuple(sizes))

    def places(self, orders: Sequence[TensorOrder]) -> list[torch.Tensor]:
        """Where what is ordered lies, one by one. The same orders again cost nothing."""
        if self._places[0] is not orders:
            there = [self.tensor(order.start, dtype_of(order.dtype), order.sizes) for order in orders]
            self._places = (orders, there)
        return self._places[1]

    def write(self, offset: int, data: bytes) -> None:
        """`data` lies at `offset`."""
        if self._map is not None and data:
            self._map[offset : offset + len(data)] = data

    def close(self) -> None:
        """The memory goes back once the companion has let go of it too."""
        self._places = ((), [])
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._map = None
        self._fd = -1
        if self._closing is not None:
            self._closing()
