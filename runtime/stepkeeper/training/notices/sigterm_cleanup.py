"""Clean up when SIGTERM ends a process that has no handler for it, and let it end then."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Final
from weakref import WeakMethod

from stepkeeper.loggers import logger
from stepkeeper.training.notices.early_notice import EarlyNotice
from stepkeeper.training.notices.signals import signal_watcher
from stepkeeper.training.notices.sigterm_handler import SigtermHandler

__all__ = ["SigtermCleanup"]

_log: Final = logger(__name__)


class SigtermCleanup:
    """Call a method before SIGTERM ends this process.

    Only where SIGTERM would end the process at once: a handler of the program, or a manager that takes the signal as
    a notice, decides by itself when to end.
    """

    def __init__(self, clean_up: Callable[[], object], *, limit_s: float) -> None:
        """Prepare; nothing is watched before `start`.

        Args:
            clean_up: A bound method, whose object is held weakly. It runs in a thread of its own.
            limit_s: How long it may take. The process ends then in any case.

        """
        self.wants_sigterm = False
        self._clean_up = WeakMethod(clean_up)
        self._limit_s = limit_s
        self._started_s = 0.0
        self._stopped = False

    def start(self) -> None:
        """Watch for SIGTERM, if this is the main thread and nobody else handles it."""
        if threading.current_thread() is not threading.main_thread() or not _ends_the_process():
            return
        self.wants_sigterm = True
        self._started_s = time.monotonic()
        signal_watcher.add_listener(self)

    def stop(self) -> None:
        """Watch no longer."""
        if self.wants_sigterm and not self._stopped:
            self._stopped = True
            signal_watcher.remove_listener(self, keep_handler=False, handled_s=None)

    def check_notices(self, sigterm_s: float | None, *, was_handled: bool) -> None:
        """Clean up and end the process, once SIGTERM has come. Called by the signal watcher, in its thread."""
        if self._stopped or was_handled or sigterm_s is None or sigterm_s < self._started_s:
            return
        if signal_watcher.is_wanted_besides(*_ENDING) or not isinstance(
            signal.getsignal(signal.SIGTERM), SigtermHandler
        ):
            # A manager, or a handler of the program, has come since: it took this signal, and ends as it sees fit.
            self._started_s = time.monotonic()
            return
        clean_up = self._clean_up()
        if clean_up is not None:
            # The signal watcher's thread is nobody else's here: it may wait.
            thread = threading.Thread(target=clean_up, name="stepkeeper-sigterm", daemon=True)
            thread.start()
            thread.join(self._limit_s)
            if thread.is_alive():
                _log.warning("SIGTERM: %s s were too short to clean up", self._limit_s)
        # The main thread may be in a long call, and only it may set a handler in Python.
        ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def forget_after_fork(self) -> None:
        """Watch nothing in a forked child: what is to be cleaned up is its parent's."""
        self._stopped = True


def _ends_the_process() -> bool:
    """Tell whether SIGTERM would end this process, at once or after other clean-ups."""
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, SigtermHandler):
        return handler.before is signal.SIG_DFL and not signal_watcher.is_wanted_besides(*_ENDING)
    return handler is signal.SIG_DFL


_ENDING: Final = (SigtermCleanup, EarlyNotice)
"""Who wants SIGTERM only to end the process with it."""
