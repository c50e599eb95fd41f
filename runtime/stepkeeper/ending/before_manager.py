"""Handle SIGTERM in a process without a training manager.

The kernel ignores SIGTERM for a container's first process without a handler. The kubelet would kill it at the end of
the grace period, and it would count as failed. The program's own handler, in Python or C, takes precedence, even a
later one.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import ClassVar, Final
from weakref import WeakMethod

from stepkeeper.contract import NOTICE_FILE, ExitCode, Identity, NoticeSource, Termination
from stepkeeper.ending.message import write
from stepkeeper.ending.signals import signal_watcher
from stepkeeper.ending.sigterm_handler import SigtermHandler
from stepkeeper.loggers import logger, run_briefly

__all__ = ["SigtermAct", "clean_up_at_sigterm", "exit_at_early_notice", "leave_notices_to_manager"]

_log: Final = logger(__name__)
_started: "list[SigtermAct]" = []
"""The act for an early notice, if any. This reference keeps it alive, since the signal watcher holds it weakly."""


def exit_at_early_notice(pod: Identity, trigger: Path = Path(NOTICE_FILE)) -> None:
    """Exit with code 75 at SIGTERM or a notice file, until a manager handles notices: nothing was trained yet.

    A signal during the import of modules is lost, but the file remains.
    """
    early = _EarlyExit(partial(_exit_early, pod), trigger)
    if early.start():
        _started[:] = [early]


def leave_notices_to_manager() -> None:
    """Stop handling early notices: a manager handles them, or ignores them by choice."""
    while _started:
        _started.pop().stop()


def clean_up_at_sigterm(clean_up: Callable[[], object], *, limit_s: float) -> "SigtermAct":
    """Return an act that calls a weakly held bound method before SIGTERM ends the process."""
    return SigtermAct(partial(_clean_up, WeakMethod(clean_up), limit_s))


class SigtermAct:
    """Act when SIGTERM would end this process. The act runs in the signal watcher's thread, and may block it."""

    yields_to_c: ClassVar[bool] = False
    """True to yield to a C handler that is installed later, such as libtpu's, if it can be called."""

    def __init__(self, act: Callable[[NoticeSource], object], trigger: Path | None = None) -> None:
        """Store the arguments. `act` ends the process. `trigger` is a file that counts as a signal."""
        self.wants_sigterm = True
        self._act = act
        self._trigger = trigger
        self._watches = False
        self._since_s = 0.0
        """Time from which on a signal counts: an earlier one was another handler's."""

    def start(self) -> bool:
        """Watch, if this is the main thread and SIGTERM would end the process. Return True if so."""
        handler = signal.getsignal(signal.SIGTERM)
        # If the watcher has installed its handler for another listener, the one that it replaced counts.
        replaced = handler.before if isinstance(handler, SigtermHandler) else handler
        is_a_notice = replaced is not handler and signal_watcher.is_wanted_besides(SigtermAct)
        is_main = threading.current_thread() is threading.main_thread()
        if replaced is signal.SIG_DFL and not is_a_notice and is_main:
            self._since_s, self._watches = time.monotonic(), True
            signal_watcher.add_listener(self)
        return self._watches

    def stop(self) -> None:
        """Watch no longer."""
        if self._watches:
            self._watches = False
            signal_watcher.remove_listener(self, keep_handler=False, handled_s=None)

    def check_notices(self, sigterm_s: float | None, *, was_handled: bool) -> None:
        """Act if there is a notice that would end the process. The signal watcher calls this in its thread."""
        came = sigterm_s is not None and sigterm_s >= self._since_s
        has_notice = came or (self._trigger is not None and self._trigger.exists())
        if not self._watches or was_handled or not has_notice:
            return
        handler = signal.getsignal(signal.SIGTERM)
        is_ours = isinstance(handler, SigtermHandler) and not (self.yields_to_c and handler.calls_displaced)
        if not is_ours or signal_watcher.is_wanted_besides(type(self)):
            # A handler or a manager that was installed since took this signal.
            self._since_s = time.monotonic()
            return
        self._act(NoticeSource.SIGTERM if came else NoticeSource.FILE)

    def forget_after_fork(self) -> None:
        """Watch nothing in a forked child: SIGTERM ends it, and the act is its parent's."""
        self._watches = False
        _started.clear()


class _EarlyExit(SigtermAct):
    """The early exit. It yields to all other acts: a follower cleans up before the signal ends the process."""

    yields_to_c = True


def _exit_early(pod: Identity, source: NoticeSource) -> None:
    message = Termination(code=ExitCode.SAVED, notice=source, rank=pod.rank)
    text = "notice (%s) before a manager exists: nothing was trained, the process exits"
    try:
        run_briefly(
            partial(write, Path(pod.termination_file), message),
            partial(_log.warning, text, source),
            sys.stdout.flush,
        )
    finally:
        os._exit(ExitCode.SAVED)


def _clean_up(method: "WeakMethod[Callable[[], object]]", limit_s: float, _: NoticeSource) -> None:
    """Clean up, for `limit_s` seconds at most, and let SIGTERM end the process."""
    if (clean_up := method()) is not None:
        thread = threading.Thread(target=clean_up, name="stepkeeper-sigterm", daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            _log.warning("SIGTERM: the cleanup took longer than %s s and was cut short", limit_s)
    # Through C: Python lets only the main thread set a handler, which may be in a long call.
    ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
