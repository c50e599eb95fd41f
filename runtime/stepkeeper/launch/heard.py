"""Hear the signals that come to this process, at once and in their order, while it waits for its children.

Python runs a handler once the system call that its main thread is in has ended; and a signal that comes just before
`waitpid` begins doesn't end it. So the launcher waits for a pipe that the C level writes each signal to, in whichever
thread it has come.
"""

import math
import os
import select
import signal
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Final, Self

__all__ = ["Signals"]

_PIPE_BYTES: Final = 65536
"""A pipe holds as many, each of them a signal."""


class Signals:
    """Signals of this process, and the ends of its children, in the order in which they came."""

    def __init__(self, numbers: Iterable[int]) -> None:
        """Hear these signals from now on, whatever whoever started this process has blocked or ignored."""
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._read_fd, select.POLLIN)
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._numbers = frozenset(numbers)
        heard = self._numbers | {signal.SIGCHLD}
        for number in heard:
            signal.signal(number, _heed)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Hear no signal any more. Those that come now change nothing, to the end of the process."""
        for number in self._numbers:
            # The interpreter takes handlers away before its end, and the signal would end the process, not its code.
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        os.close(self._write_fd)
        os.close(self._read_fd)

    def wait(self, timeout_s: float) -> list[int]:
        """Wait until a signal comes, a child ends, or the time is over, and return the signals that have come.

        Args:
            timeout_s: The longest time to wait; math.inf for as long as it takes.

        """
        self._poll.poll(None if timeout_s == math.inf else 1000 * max(0.0, timeout_s))
        with suppress(BlockingIOError):
            return [number for number in os.read(self._read_fd, _PIPE_BYTES) if number != signal.SIGCHLD]
        return []


def _heed(signum: int, frame: FrameType | None) -> None:
    """Do nothing. With a handler of Python's, the C level writes the signal to the pipe."""
