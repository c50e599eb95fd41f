"""Choose a process's exit code, and force the exit where the process can't end by itself in time."""

import ctypes
import faulthandler
import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final, NoReturn

from stepkeeper.contract import Cause, ExitCode
from stepkeeper.errors import UNANSWERED, FencedError, NoticeDeadlineError, PartlyRestoredError, PeerLostError
from stepkeeper.loggers import logger, run_briefly

__all__ = [
    "FAILURE",
    "STUCK",
    "end_now",
    "ending_in_time",
    "exit_at",
    "exit_code_of",
    "find_end",
    "find_known_cause",
    "format_traceback",
    "has_own_code",
]

FAILURE: Final = 1
"""Python's exit code for an exception."""

STUCK: Final = "the grace period is over while the training is stuck in a call"

_log: Final = logger(__name__)
_LAST_MOMENT_S: Final = 0.15
"""Seconds after a process's time limit at which it ends even if no Python thread can run."""

_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells report a program that Ctrl-C ended."""

_CODES: Final[dict[type[BaseException], int]] = {
    FencedError: ExitCode.FENCED,
    PeerLostError: ExitCode.PEER_LOST,
    NoticeDeadlineError: ExitCode.SAVED,
    KeyboardInterrupt: _INTERRUPTED,
}
_SIGEV_THREAD: Final = 2
_TIMER_ABSTIME: Final = 1


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that `error` ends."""
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or ExitCode.DONE
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), FAILURE)


def has_own_code(error: BaseException) -> bool:
    """Return True if `error` has an exit code other than Python's own 1."""
    return isinstance(error, FencedError | PeerLostError | NoticeDeadlineError)


def find_end(error: BaseException) -> BaseException:
    """Return the error that decides the exit: the cause of a partial restore if `has_own_code`, else `error`."""
    cause = error.__cause__ if isinstance(error, PartlyRestoredError) else None
    return error if cause is None or not has_own_code(cause) else cause


def format_traceback(error: BaseException) -> str | None:
    """Format `error` as text; None for a chosen exit without a message."""
    if isinstance(error, SystemExit):
        return None if isinstance(error.code, int | None) else str(error.code)
    return "".join(traceback.format_exception(error))


def find_known_cause(failure: BaseException | None) -> Cause | None:
    """Return the external cause that the exception or its chain proves, or None."""
    seen: list[BaseException] = []  # a chain of causes may be a circle
    while failure is not None and failure not in seen:
        if isinstance(failure, UNANSWERED):
            return Cause.STORAGE_UNAVAILABLE
        seen.append(failure)
        failure = failure.__cause__
    return None


def end_now(code: int, why: str, *first: Callable[[], object]) -> NoReturn:
    """End the process at once, from any thread, after `first`, the stacks of all threads, and a log line."""
    try:
        run_briefly(*first, _show_stacks, partial(_log.critical, "%s; the process exits now", why))
    finally:
        os._exit(code)


def _show_stacks() -> None:
    # Through memory: faulthandler holds the GIL while a write to stderr blocks.
    with os.fdopen(os.memfd_create("stacks"), "w+b", buffering=0) as memory:
        faulthandler.dump_traceback(memory)
        memory.seek(0)
        stacks = memory.read()
    while stacks:
        stacks = stacks[os.write(2, stacks) :]


class _Event(ctypes.Structure):
    """C's `struct sigevent`."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 32),
    )


def exit_at(at_s: float, code: int) -> Callable[[], object]:
    """Make the process exit at `at_s` of time.monotonic(), even if no Python code can run, unless the result is called.

    Python threads don't run while the interpreter is finalized, which can take seconds on a busy machine. A timer of
    the C library has its own thread, which calls `_exit`. In a C library without such timers this does nothing.
    """
    library = ctypes.CDLL(None)
    function = ctypes.cast(library["_exit"], ctypes.c_void_p).value
    # The timer's thread calls function(value).
    event = _Event(value=code, notify=_SIGEV_THREAD, function=function)
    timer = ctypes.c_void_p()
    creates = getattr(library, "timer_create", None)
    if creates is None or creates(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) != 0:
        return lambda: None
    fraction, whole = math.modf(at_s)
    # C's `struct itimerspec`: the interval, and the time, each in seconds and nanoseconds.
    when = (ctypes.c_long * 4)(0, 0, int(whole), int(fraction * 1e9))
    library.timer_settime(timer, _TIMER_ABSTIME, ctypes.byref(when), None)
    return partial(library.timer_delete, timer)


@contextmanager
def ending_in_time(left_s: float | None, code: int, *, lasts: Callable[[], bool]) -> Iterator[None]:
    """End the process with `code` if the block hasn't ended in `left_s` seconds; None sets no limit.

    If `lasts` returns True after the block, the limit stays: the whole process has to end by then, though the
    interpreter still waits for threads, and calls registered exit functions.
    """
    if left_s is None:
        yield
        return
    cancel = exit_at(time.monotonic() + left_s + _LAST_MOMENT_S, code)
    watch = threading.Timer(left_s, end_now, (code, STUCK))
    watch.name, watch.daemon = "stepkeeper-end", True
    watch.start()
    try:
        yield
    finally:
        if not lasts():
            watch.cancel()
            cancel()
