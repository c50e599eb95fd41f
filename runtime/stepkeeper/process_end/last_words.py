"""Leave the last word of a process where the kubelet looks for it: one file for all processes of the pod."""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stepkeeper.contract import ContractError, Termination
from stepkeeper.loggers import logger

__all__ = ["count_restarts", "leave_last_word", "leave_word_for_another"]

_log: Final = logger(__name__)
_LOCK_S: Final = 1.0
"""Seconds that another process of the pod, which may be stopped, keeps this one from writing its message."""

_MESSAGE_BYTES: Final = 1 << 16


def leave_last_word(path: Path, word: Termination) -> None:
    """Write the termination message, unless another process has left one that tells more; log it if that fails.

    The process ends either way, and its exit code says most of it. If the process is killed meanwhile, either an
    earlier message or this one can be read: the file is the kubelet's, so it can't be replaced by another file, and
    it is never emptied first.

    Args:
        path: The termination message's file.
        word: What to say.

    """
    _write_over(path, word, word.replaces)


def leave_word_for_another(path: Path, word: Termination) -> None:
    """Write the termination message of another process, unless that one has left its own, or others say more.

    Args:
        path: The termination message's file. None is made: the kubelet's is there.
        word: What to say.

    """

    def replaces(earlier: Termination) -> bool:
        is_own = (earlier.rank, earlier.restart) == (word.rank, word.restart)
        return not is_own and word.replaces(earlier)

    if path.exists():
        _write_over(path, word, replaces)


def _write_over(path: Path, word: Termination, replaces: Callable[[Termination], bool]) -> None:
    said = word.to_json()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(fd)
            if not _may_write(os.pread(fd, _MESSAGE_BYTES, 0), replaces):
                return
            # Trailing blanks don't change a JSON text.
            os.pwrite(fd, said.ljust(os.fstat(fd).st_size), 0)
            os.ftruncate(fd, len(said))
        finally:
            os.close(fd)
    except OSError as error:
        _log.warning("the termination message can't be written to %s: %s", path, error)


def count_restarts() -> int | None:
    """Return how often torchrun has started its processes anew; None without torchrun."""
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else None


def _lock(fd: int) -> None:
    """Keep other processes of the pod from writing until the file is closed, if they let go of it in time."""
    ends_s = time.monotonic() + _LOCK_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= ends_s:
                return None
            time.sleep(0.01)


def _may_write(data: bytes, replaces: Callable[[Termination], bool]) -> bool:
    """Tell whether the file's content may be replaced; so may whatever is no last word: somebody else's, or none."""
    try:
        return replaces(Termination.from_json(data))
    except ContractError:
        return True
