"""Act on SIGTERM in a process that no manager trains in, where the signal would end it at once.

The first process of a container ignores SIGTERM without a handler: it would be killed at the end of the grace period,
and count as failed. A handler of the program, also a later one, in Python or in C, decides by itself.
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
from stepkeeper.loggers import logger, tell_briefly

__all__ = ["SigtermAct", "clean_up_at_sigterm", "exit_at_early_notice", "leave_notices_to_manager"]

_log: Final = logger(__name__)
_started: "list[SigtermAct]" = []
"""What acts on an early notice, if anything does: the signal watcher holds it weakly."""


def exit_at_early_notice(pod: Identity, trigger: Path = Path(NOTICE_FILE)) -> None:
    """Exit with code 75 at SIGTERM or a notice file, until a manager takes notices: nothing was trained yet.

    A signal that came while modules were imported is lost, but the file is there.

    Args:
        pod: Who this process is, and where its termination message is written.
        trigger: A file whose existence is a notice.

    """
    early = _EarlyExit(partial(_exit_early, pod), trigger)
    if early.start():
        _started[:] = [early]


def leave_notices_to_manager() -> None:
    """Act on no early notice any more: a manager does, or wants none."""
    while _started:
        _started.pop().stop()


def clean_up_at_sigterm(clean_up: Callable[[], object], *, limit_s: float) -> "SigtermAct":
    """Return what calls a bound method, whose object is held weakly, before SIGTERM ends the process; not started."""
    return SigtermAct(partial(_clean_up, WeakMethod(clean_up), limit_s))


class SigtermAct:
    """Act when SIGTERM would end this process. The act runs in the signal watcher's thread, which it may hold up."""

    yields_to_c: ClassVar[bool] = False
    """True if C code that is installed later decides, as libtpu's, where it can be called."""

    def __init__(self, act: Callable[[NoticeSource], object], trigger: Path | None = None) -> None:
        """Prepare; nothing is watched before `start`.

        Args:
            act: Called with what came; it ends the process.
            trigger: A file that counts as a signal, also if it was there before; None for no such file.

        """
        self.wants_sigterm = True
        self._act = act
        self._trigger = trigger
        self._since_s = 0.0
        self._watches = False

    def start(self) -> bool:
        """Watch, if this is the main thread and SIGTERM would end the process. Return True if so."""
        handler = signal.getsignal(signal.SIGTERM)
        before = handler.before if isinstance(handler, SigtermHandler) else handler
        is_taken = before is not handler and signal_watcher.is_wanted_besides(SigtermAct)
        if (
            before is signal.SIG_DFL
            and not is_taken
            and threading.current_thread() is threading.main_thread()
        ):
            self._since_s, self._watches = time.monotonic(), True
            signal_watcher.add_listener(self)
        return self._watches

    def stop(self) -> None:
        """Watch no longer."""
        if self._watches:
            self._watches = False
            signal_watcher.remove_listener(self, keep_handler=False, handled_s=None)

    def check_notices(self, sigterm_s: float | None, *, was_handled: bool) -> None:
        """Act if something has come, and still ends the process. The signal watcher calls this in its thread."""
        came = sigterm_s is not None and sigterm_s >= self._since_s
        found = came or (self._trigger is not None and self._trigger.exists())
        if not self._watches or was_handled or not found:
            return
        handler = signal.getsignal(signal.SIGTERM)
        is_ours = isinstance(handler, SigtermHandler) and not (self.yields_to_c and handler.tells_displaced)
        if not is_ours or signal_watcher.is_wanted_besides(type(self)):
            # The handler or the manager that has come since took this signal.
            self._since_s = time.monotonic()
            return
        self._act(NoticeSource.SIGTERM if came else NoticeSource.FILE)

    def forget_after_fork(self) -> None:
        """Watch nothing in a forked child: SIGTERM ends that, and what is to be done is its parent's."""
        self._watches = False
        _started.clear()


class _EarlyExit(SigtermAct):
    """Yield to all other acts: a follower cleans up before the signal ends the process."""

    yields_to_c = True


def _exit_early(pod: Identity, source: NoticeSource) -> None:
    message = Termination(code=ExitCode.SAVED, notice=source, rank=pod.rank)
    said = "notice (%s) before there is a manager: nothing was trained, and the process ends"
    try:
        tell_briefly(
            partial(write, Path(pod.termination_file), message),
            partial(_log.warning, said, source),
            sys.stdout.flush,
        )
    finally:
        os._exit(ExitCode.SAVED)


def _clean_up(held: "WeakMethod[Callable[[], object]]", limit_s: float, _: NoticeSource) -> None:
    """Clean up, for `limit_s` seconds at most, and let SIGTERM end the process."""
    if (clean_up := held()) is not None:
        thread = threading.Thread(target=clean_up, name="stepkeeper-sigterm", daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            _log.warning("SIGTERM: %s s were too short to clean up", limit_s)
    # The main thread may be in a long call, and only it may set a handler in Python.
    ctypes.pythonapi.PyOS_setsig(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
