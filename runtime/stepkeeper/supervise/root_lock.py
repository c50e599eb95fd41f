"""Lock a root against a second `stepkeeper run` that uses it."""

import fcntl
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from stepkeeper.errors import RefusedError

__all__ = ["lock_root"]

_NAME: Final = "run.lock"


@contextmanager
def lock_root(uri: str) -> Iterator[None]:
    """Hold the lock of the root at `uri` while the block runs. Raises RefusedError, which names the holder.

    The lock of a folder is in it. That of a bucket is on this machine: runs on two machines are kept apart by the log.
    """
    path = _choose_file(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 4096, 0).decode(errors="replace").strip() or "another process"
            raise RefusedError(
                f"{uri} is in use by {holder}. Wait for its end, or use another root"
            ) from None
        command = " ".join(sys.argv[1:])
        text = f"process {os.getpid()} on {socket.gethostname()}: stepkeeper {command}\n"
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(errors="replace"), 0)
        yield
    finally:
        # The kernel releases the lock. The file stays: a process may be waiting to lock it.
        os.close(fd)


def _choose_file(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path), ".stepkeeper", _NAME)
    folder = Path(tempfile.gettempdir(), f"stepkeeper-{os.getuid()}")
    return folder / f"{sha256(uri.encode()).hexdigest()[:32]}.{_NAME}"
