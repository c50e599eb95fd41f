"""Write the stacks of this process's threads into memory that its companion reads. This is the trainer's part.

The companion requests them. If a held GIL keeps all Python threads from answering, it sends a signal, whose handler is
faulthandler's, in C.
"""

import faulthandler
import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

from stepkeeper.fork_guard import MemoryFile, forget_in_forks

__all__ = ["END_OF_STACKS", "StackFile", "stack_file"]

END_OF_STACKS: Final = "end of stacks"
_REAL_TIME: Final = range(64, 34, -1)
"""Linux's real-time signals, the last first. C libraries use the first ones."""


class StackFile:
    """The memory, and the signal that fills it. `stack_file` makes the only instance of a process."""

    def __init__(self) -> None:
        self._memory = MemoryFile("stepkeeper-stacks")
        self.fd: Final = self._memory.fd
        # The companion empties it before each request: what is written then belongs at its start.
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)
        self.signal_number: Final = _find_free_signal()
        """None if all real-time signals are taken, or it isn't known which."""

        if self.signal_number is not None:
            faulthandler.register(self.signal_number, self.fd, all_threads=True)
        forget_in_forks(self)

    def write(self, number: int) -> None:
        """Write the stacks of all threads, followed by the request's `number`."""
        faulthandler.dump_traceback(self.fd, all_threads=True)
        os.write(self.fd, f"{END_OF_STACKS} {number}\n".encode())

    def forget_after_fork(self) -> None:
        """Release the signal in a forked child: the memory is its parent's."""
        global _found
        _found = None
        if self.signal_number is not None:
            faulthandler.unregister(self.signal_number)


_lock: Final = threading.Lock()
_found: StackFile | None = None


def stack_file() -> StackFile:
    """Return this process's file of stacks. The first call makes it."""
    global _found
    with _lock:
        if _found is None:
            _found = StackFile()
        return _found


def _find_free_signal() -> int | None:
    """Find a real-time signal that nothing in this process handles or ignores, C code included."""
    taken = ~0
    with suppress(OSError):  # a sandbox without /proc
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        masks = dict(line.split(":", 1) for line in lines if line.startswith(("SigCgt:", "SigIgn:")))
        taken = int(masks["SigCgt"], 16) | int(masks["SigIgn"], 16)
    return next((number for number in _REAL_TIME if not taken >> (number - 1) & 1), None)
