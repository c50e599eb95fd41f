"""Memory shared with the companion: one anonymous file, reused from save to save, grown when it has to be.

An anonymous file is bound by the pod's memory limit only; a pod's /dev/shm has 64 MB.
"""

import math
import mmap
import os
from collections.abc import Sequence
from typing import Final

import torch

__all__ = ["ALIGNMENT_BYTES", "Region"]

ALIGNMENT_BYTES: Final = 64
"""Every piece begins at a multiple: enough for any dtype and for wide copies."""


class Region:
    """A stretch of shared memory. Its pages stay with the process, so that a later save doesn't fault them in again."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("stepkeeper-snapshot")
        self._map: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def size_bytes(self) -> int:
        return self._bytes.numel()

    def reserve(self, size_bytes: int) -> None:
        """At least `size_bytes` are there. Views that were taken before are of the old memory: drop them first."""
        if size_bytes <= self.size_bytes:
            return
        os.ftruncate(self._fd, size_bytes)
        self._map = mmap.mmap(self._fd, size_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, offset: int, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor:
        """The tensor of this shape whose elements lie at `offset`."""
        length = math.prod(sizes) * dtype.itemsize
        return self._bytes[offset : offset + length].view(dtype).view(tuple(sizes))

    def write(self, offset: int, data: bytes) -> None:
        """`data` lies at `offset`."""
        if self._map is not None and data:
            self._map[offset : offset + len(data)] = data

    def close(self) -> None:
        """The memory goes back once the companion has let go of it too."""
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
