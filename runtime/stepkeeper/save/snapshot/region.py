"""Share memory with the companion: one anonymous file, reused from save to save, grown when needed.

An anonymous file is limited only by the pod's memory limit, while a pod's /dev/shm has 64 MB.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Final

import torch

from stepkeeper.checkpoint.orders import TensorOrder
from stepkeeper.fork_guard import forget_in_forks, forks_held_back
from stepkeeper_planners.dtypes import dtype_of

__all__ = ["ALIGNMENT_BYTES", "Region"]

ALIGNMENT_BYTES: Final = 64
"""Every piece begins at a multiple of this, which suits any dtype and wide copies."""

_ROOM_PART: Final = 16
"""A region is larger than requested by this fraction, so that values that grow a little don't move it. The extra
costs nothing, because a page takes no memory until it is written to.
"""

_LEAST_ROOM_BYTES: Final = 1024 * 1024
_POPULATE_BYTES: Final = 32 * 1024 * 1024
_MADV_POPULATE_WRITE: Final = 23


class Region:
    """A stretch of shared memory, whose pages stay for later saves, so that these fault none in."""

    def __init__(self) -> None:
        self._fd = -1
        self._closing: weakref.finalize[[int], Region] | None = None
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._views: tuple[Sequence[TensorOrder], list[torch.Tensor]] = ((), [])
        forget_in_forks(self)

    @property
    def fd(self) -> int:
        """File descriptor of the memory, from the first `reserve` on; -1 before."""
        return self._fd

    @property
    def size_bytes(self) -> int:
        return self._bytes.numel()

    def reserve(self, size_bytes: int) -> None:
        """Make the region hold at least `size_bytes`. Drop earlier views first: they refer to the old memory."""
        if size_bytes <= self.size_bytes and self._fd >= 0:
            return
        wanted = size_bytes + max(size_bytes // _ROOM_PART, _LEAST_ROOM_BYTES)
        wanted = -(-wanted // mmap.PAGESIZE) * mmap.PAGESIZE
        # The map has a descriptor of its own, so it is made in this block too.
        with forks_held_back():
            if self._fd < 0:
                self._fd = os.memfd_create("stepkeeper-snapshot")
                # Closes the file also for a region that was dropped without `close`.
                self._closing = weakref.finalize(self, os.close, self._fd)
            os.ftruncate(self._fd, wanted)
            self._map = mmap.mmap(self._fd, wanted)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._views = ((), [])

    def populate(self, size_bytes: int) -> None:
        """Fault in the first `size_bytes`, if the kernel can do that (Linux 5.14). The contents don't change.

        A background thread calls this, mostly without the GIL, while others use the region.
        """
        memory = self._bytes  # stays mapped even if `reserve` replaces it meanwhile
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        end = min(size_bytes, memory.numel())
        for start in range(0, end, _POPULATE_BYTES):
            if self._fd < 0:
                return
            length = min(_POPULATE_BYTES, end - start)
            if madvise(memory.data_ptr() + start, length, _MADV_POPULATE_WRITE) != 0:
                return

    def view_tensor(self, offset: int, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
        """Return the view of the elements at `offset` as a tensor of this dtype and shape."""
        whole, shape = self._bytes.view(dtype), tuple(sizes)
        return whole.as_strided(shape, _strides(shape), offset // whole.itemsize)

    def view_orders(self, orders: Sequence[TensorOrder]) -> list[torch.Tensor]:
        """Return a view of the region for each order. A call with the same orders again costs nothing."""
        if self._views[0] is not orders:
            whole = {name: self._bytes.view(dtype_of(name)) for name in {order.dtype for order in orders}}
            there = []
            for order in orders:
                # One call for each: there may be thousands.
                part = whole[order.dtype]
                there.append(
                    part.as_strided(order.sizes, _strides(order.sizes), order.start // part.itemsize)
                )
            self._views = (orders, there)
        return self._views[1]

    def write_bytes(self, offset: int, data: bytes) -> None:
        """Write `data` at `offset`."""
        if self._map is not None and data:
            self._map[offset : offset + len(data)] = data

    def close(self) -> None:
        """Release the memory. The system frees it once the companion has released it too."""
        self._views = ((), [])
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._map = None
        self._fd = -1
        if self._closing is not None:
            self._closing()

    def forget_after_fork(self) -> None:
        """Close this copy in a forked child, which would otherwise keep the memory allocated while it lives."""
        self.close()


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()
