"""Heed notices before there is a manager: while a pod waits for the others, nothing else in it does."""

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from stepkeeper.contract import NOTICE_FILE, ExitCode

__all__ = ["leaving_on_notice"]

_LOOK_MILLIS: Final = 200
_LEAVE_S: Final = 2.0
"""Seconds that the main thread has to hear of a notice. While gloo connects to the other ranks it hears nothing."""


@contextmanager
def leaving_on_notice(trigger: Path = Path(NOTICE_FILE)) -> Iterator[None]:
    """End the process with code 75 at SIGTERM or a notice file, unless the program has a handler of its own.

    The first process of a container ignores SIGTERM without a handler: it would be killed at the end of the grace
    period, and count as failed. One that came while modules were imported is lost, but the file is there.

    Args:
        trigger: A file whose existence is a notice.

    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(read_fd, trigger, ended), name="early-notice", daemon=True)
    signal.signal(signal.SIGTERM, _leave)
    wakeup_before = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        os.write(write_fd, b"\0")
        # Until it has ended it may send the signal, which without a handler would end the process with 143.
        watch.join()
        signal.set_wakeup_fd(wakeup_before)
        if signal.getsignal(signal.SIGTERM) is _leave:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(read_fd)
        os.close(write_fd)


def _watch(read_fd: int, trigger: Path, ended: threading.Event) -> None:
    """End the process once a notice is there: by the main thread's handler, or without it if it doesn't hear."""
    poll = select.poll()
    poll.register(read_fd, select.POLLIN)
    while not ended.is_set():
        heard = os.read(read_fd, 4096) if poll.poll(_LOOK_MILLIS) else b""
        told = signal.SIGTERM in heard
        if told or trigger.exists():
            if not told:
                os.kill(os.getpid(), signal.SIGTERM)
            if not ended.wait(_LEAVE_S):
                os._exit(ExitCode.SAVED)
            return


def _leave(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001  # the signature of handlers
    # A notice may come twice, by the file and by the signal: the second one must not end what has begun to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(ExitCode.SAVED)
