"""Heed notices before there is a manager: nothing was trained yet, so the process ends at once, with code 75."""

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Final

from stepkeeper.contract import NOTICE_FILE, ExitCode, Identity, Termination
from stepkeeper.loggers import logger, tell_briefly
from stepkeeper.process_end.last_words import count_restarts, leave_last_word
from stepkeeper.training.notices.signals import signal_watcher
from stepkeeper.training.notices.sigterm_handler import SigtermHandler

__all__ = ["EarlyNotice", "heed_early_notices", "leave_notices_to_manager"]

_log: Final = logger(__name__)
_started: "list[EarlyNotice]" = []
"""The one that heeds notices now, if any: the signal watcher holds it weakly."""


def heed_early_notices(pod: Identity, trigger: Path = Path(NOTICE_FILE)) -> None:
    """End this process of a pod with code 75 at SIGTERM or a notice file, until a manager takes notices.

    The first process of a container ignores SIGTERM without a handler: it would be killed at the end of the grace
    period, and count as failed. A signal that came while modules were imported is lost, but the file is there.

    A program that has a handler of its own, or installs one later, in Python or in C, decides by itself.

    Args:
        pod: Who this process is, and where it leaves its last word.
        trigger: A file whose existence is a notice.

    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        _started[:] = [EarlyNotice(pod, trigger)]
        signal_watcher.add_listener(_started[0])


def leave_notices_to_manager() -> None:
    """Heed no notices here any more: a manager does, or wants none."""
    while _started:
        signal_watcher.remove_listener(_started.pop(), keep_handler=False, handled_s=None)


class EarlyNotice:
    """Ends the process at a notice. It has no state to save, and may be anywhere, also in a long call in C."""

    def __init__(self, pod: Identity, trigger: Path) -> None:
        """Heed what comes from now on, once the signal watcher calls.

        Args:
            pod: Who this process is.
            trigger: A file whose existence is a notice, also if it was there before.

        """
        self.wants_sigterm = True
        self._pod = pod
        self._trigger = trigger
        self._since_s = time.monotonic()
        self._is_parents = False

    def check_notices(self, sigterm_s: float | None, *, was_handled: bool) -> None:
        """End the process if a notice has come. Called by the signal watcher, in its thread."""
        told = sigterm_s is not None and sigterm_s >= self._since_s
        if self._is_parents or was_handled or not (told or self._trigger.exists()):
            return
        if not _ends_the_process():
            # Whoever took this signal ends as it sees fit.
            self._since_s = time.monotonic()
            return
        try:
            source = "sigterm" if told else "file"
            said = "notice (%s) before there is a manager: nothing was trained, and the process ends"
            tell_briefly(
                partial(self._leave_word, source), partial(_log.warning, said, source), sys.stdout.flush
            )
        finally:
            os._exit(ExitCode.SAVED)

    def forget_after_fork(self) -> None:
        """Heed nothing in a forked child: SIGTERM ends that, and the file is its parent's notice."""
        self._is_parents = True
        _started.clear()

    def _leave_word(self, source: str) -> None:
        word = Termination(code=ExitCode.SAVED, notice=source, rank=self._pod.rank, restart=count_restarts())
        leave_last_word(Path(self._pod.termination_file), word)


def _ends_the_process() -> bool:
    """Tell whether nobody else wants SIGTERM: no manager, and no handler that the program or its libraries have set."""
    handler = signal.getsignal(signal.SIGTERM)
    is_ours = isinstance(handler, SigtermHandler) and not handler.tells_displaced
    return is_ours and not signal_watcher.is_wanted_besides(EarlyNotice)
