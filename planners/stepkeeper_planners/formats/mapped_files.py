"""Map files into memory."""

import mmap
import os
from typing import BinaryIO, Final

__all__ = ["map_file"]

# Python names it since 3.13.
_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)


def map_file(file: BinaryIO) -> mmap.mmap:
    """Map a file that isn't empty, and may be larger than memory. Writes to it stay in this process."""
    return mmap.mmap(
        file.fileno(),
        os.fstat(file.fileno()).st_size,
        flags=mmap.MAP_PRIVATE | _NO_RESERVE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )
