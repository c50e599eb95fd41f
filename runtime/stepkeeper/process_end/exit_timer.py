"""End the process at a time with a code, also where no code of Python runs any more.

While the interpreter is taken down, which can take seconds on a busy machine, threads of Python stand still. A timer of
the C library has a thread of its own that calls `_exit`.
"""

import ctypes
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Final

__all__ = ["ExitTimer"]

_SIGEV_THREAD: Final = 2
_ABSOLUTE: Final = 1


class _Event(ctypes.Structure):
    """C's `struct sigevent`: what happens when the time has come."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 32),
    )


class _Times(ctypes.Structure):
    """C's `struct itimerspec`."""

    _fields_ = (
        ("every_s", ctypes.c_long),
        ("every_ns", ctypes.c_long),
        ("after_s", ctypes.c_long),
        ("after_ns", ctypes.c_long),
    )


class ExitTimer:
    """Ends the process at a time, unless it is cancelled before. Without such timers in the C library nothing ends."""

    def __init__(self, code: int, at_s: float) -> None:
        """Start the timer.

        Args:
            code: The exit code.
            at_s: When to end the process, by time.monotonic().

        """
        library = ctypes.CDLL(None)
        self._cancel: Callable[[], object] = lambda: None
        if not hasattr(library, "timer_create"):
            return
        function = ctypes.cast(library["_exit"], ctypes.c_void_p).value
        event = _Event(value=code, notify=_SIGEV_THREAD, function=function)
        timer = ctypes.c_void_p()
        if library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) != 0:
            return
        self._cancel = partial(library.timer_delete, timer)
        fraction, whole = math.modf(at_s)
        when = _Times(after_s=int(whole), after_ns=int(fraction * 1e9))
        library.timer_settime(timer, _ABSOLUTE, ctypes.byref(when), None)

    def cancel(self) -> None:
        """Let the process go on."""
        cancel, self._cancel = self._cancel, lambda: None
        cancel()
