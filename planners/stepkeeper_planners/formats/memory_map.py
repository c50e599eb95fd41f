"""Map a file into memory."""

import mmap
from typing import BinaryIO, Final

__all__ = ["map_file"]

# Python names it since 3.13.
_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)


def map_file(file: BinaryIO, size_bytes: int) -> mmap.mmap:
    """Map the file, privately: what is written to the memory stays in this process.

    No memory is reserved for writes, so the file may be larger than the memory.
    """
    return mmap.mmap(
        file.fileno(),
        size_bytes,
        flags=mmap.MAP_PRIVATE | _NO_RESERVE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )
