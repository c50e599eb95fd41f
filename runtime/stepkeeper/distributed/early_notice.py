"""Heed SIGTERM before there is a manager: while a pod waits for the others, nothing else in it does."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from stepkeeper.contract import ExitCode

__all__ = ["leaving_on_notice"]


@contextmanager
def leaving_on_notice() -> Iterator[None]:
    """End the process with code 75 at SIGTERM, unless the program has a handler of its own.

    The first process of a container ignores SIGTERM without a handler: it would be killed at the end of the grace
    period, and count as failed.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001  # the signature of handlers
    sys.exit(ExitCode.SAVED)
