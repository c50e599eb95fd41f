"""Exchange two paths in one step, if the file system can do it."""

import ctypes
import errno
import os
from pathlib import Path
from typing import Final

__all__ = ["exchange_paths"]

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2
_CANNOT: Final = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
"""The error codes of file systems and kernels that can't do it, such as NFS and FUSE."""


def exchange_paths(one: Path, other: Path) -> bool:
    """Exchange what is at the two paths. Return False, with nothing done, if it can't be done here."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))
