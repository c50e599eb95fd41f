"""Measure the fastest write to the disk: aligned buffers past the page cache, then fsync."""

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

__all__ = ["direct_write_s"]

_AT_ONCE_BYTES: Final = 16 * 1024 * 1024


def direct_write_s(folder: Path, size_bytes: int, n_files: int) -> float | None:
    """Seconds for so many bytes in so many files side by side; None where the file system has no O_DIRECT."""
    buffer = mmap.mmap(-1, _AT_ONCE_BYTES)
    buffer.write(os.urandom(_AT_ONCE_BYTES))

    def write(index: int) -> None:
        fd = os.open(folder / f"direct-{index}", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            for _ in range(max(1, size_bytes // n_files // _AT_ONCE_BYTES)):
                os.write(fd, buffer)
            os.fsync(fd)
        finally:
            os.close(fd)

    began_s = time.perf_counter()
    try:
        with ThreadPoolExecutor(n_files) as pool:
            list(pool.map(write, range(n_files)))
    except OSError:
        return None
    return time.perf_counter() - began_s
