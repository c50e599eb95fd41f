"""A file as memory that is read where it is used."""

import mmap
from typing import BinaryIO, Final

__all__ = ["map_file"]

# Python names it since 3.13.
_NO_RESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)


def map_file(file: BinaryIO, size_bytes: int) -> mmap.mmap:
    """The file's bytes. What is written there stays in this process.

    No memory is set aside for what might be written, so that a file may be larger than the memory.
    """
    return mmap.mmap(
        file.fileno(),
        size_bytes,
        flags=mmap.MAP_PRIVATE | _NO_RESERVE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
    )
