"""Act where SIGTERM would end a process: exit with code 75 before a manager exists, or clean up.

The kernel ignores SIGTERM for a container's first process without a handler. The kubelet would kill it at the end of
the grace period, and it would count as failed.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final
from weakref import WeakMethod

from stepkeeper.contract import NOTICE_FILE, ExitCode, Identity, NoticeSource, Termination
from stepkeeper.ending.message import write
from stepkeeper.ending.signals import signal_watcher
from stepkeeper.loggers import logger, run_briefly

__all__ = ["SigtermAct", "clean_up_at_sigterm", "exit_at_early_notice", "leave_notices_to_manager"]

_log: Final = logger(__name__)


class SigtermAct:
    """Act when SIGTERM would end this process. The act runs in the signal watcher's thread, and may block it."""

    is_manager = False
    wants_sigterm = True

    def __init__(self, act: Callable[[NoticeSource], object], trigger: Path | None = None) -> None:
        """Watch from now on, if SIGTERM would end this process now.

        `act` ends the process. `trigger` is a file that counts as a signal.
        """
        self._act = act
        self._trigger = trigger
        if signal_watcher.ends_process:
            signal_watcher.add(self)

    def stop(self) -> None:
        """Watch no longer."""
        signal_watcher.remove(self)

    def on_tick(self) -> None:
        """Act if there is a notice that would end the process. The signal watcher calls this."""
        source = NoticeSource.FILE if signal_watcher.read_sigterm() is None else NoticeSource.SIGTERM
        has_notice = source is NoticeSource.SIGTERM or (self._trigger is not None and self._trigger.exists())
        if has_notice and signal_watcher.ends_process:
            self._act(source)


_early: Final[list[SigtermAct]] = []
"""The act for an early notice, if any. This reference keeps it alive, since the signal watcher holds it weakly."""


def exit_at_early_notice(pod: Identity, trigger: Path = Path(NOTICE_FILE)) -> None:
    """Exit with code 75 at SIGTERM or a notice file, until a manager handles notices: nothing was trained yet.

    A signal during the import of modules is lost, but the file remains.
    """
    leave_notices_to_manager()
    _early.append(SigtermAct(partial(_exit_early, pod), trigger))


def leave_notices_to_manager() -> None:
    """Stop handling early notices: a manager handles them, or ignores them by choice."""
    while _early:
        _early.pop().stop()


def clean_up_at_sigterm(clean_up: Callable[[], object], *, limit_s: float) -> SigtermAct:
    """Call a weakly held bound method before SIGTERM ends the process, until the returned act is stopped."""
    return SigtermAct(partial(_clean_up, WeakMethod(clean_up), limit_s))


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
