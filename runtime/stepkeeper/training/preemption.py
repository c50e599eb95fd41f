"""Notices: what asks this process to save and stop. Level-triggered: once there, a notice stays."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepkeeper.loggers import logger
from stepkeeper.training.signals import signal_watcher

__all__ = ["Notice", "NoticeWatcher"]

_log: Final = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    source: str
    """sigterm, file, directive, call or peer."""

    monotonic_s: float
    """When it came, by time.monotonic()."""


class NoticeWatcher:
    """Collects notices from SIGTERM, a trigger file and calls; the first one counts.

    `on_tick` runs five times a second in the thread that all watchers of the process share. What it or `on_notice`
    raises is logged: the next SIGTERM would be for nobody else.
    """

    def __init__(
        self, trigger: Path | None, on_tick: Callable[[], None], on_notice: Callable[[Notice], None]
    ) -> None:
        """Nothing is watched yet."""
        self.wants_sigterm = False
        self._trigger = trigger
        self._on_tick = on_tick
        self._on_notice = on_notice
        self._notice: Notice | None = None
        self._sigterm_s: float | None = None
        """When SIGTERM came that is, or would have been, the notice: what it came behind may have been another one."""

        self._lock = threading.Lock()
        self._complaint = ""
        self._checking = threading.RLock()
        self._started = self._closed = False
        # What came before is no notice here, also where the thread has yet to read of it.
        signal_watcher.process_pending_signals()
        self._made_s = time.monotonic()

    @property
    def notice(self) -> Notice | None:
        return self._notice

    @property
    def misses_sigterm(self) -> bool:
        """SIGTERM is to be a notice here, and nobody has taken it: no call has come in the main thread."""
        return self.wants_sigterm and not self._closed and not signal_watcher.handles_sigterm

    def start(self, *, signals: bool) -> None:
        """Notices are collected from now on; SIGTERM's too if `signals` and this is the main thread.

        Called again, in the main thread, it makes up for a call in another one.

        A SIGTERM that came before, while another watcher kept it from ending the process, is a notice here too; and
        whenever it came, where another watcher has ended with it as its notice: the process is to end all the same.
        """
        self.wants_sigterm, self._started = signals, True
        signal_watcher.add_listener(self)

    def record_notice(self, source: str, came_s: float | None = None) -> None:
        """There is a notice, from `source` if it is the first. It came now, or at `came_s` by time.monotonic()."""
        with self._lock:
            if self._notice is not None:
                return
            self._notice = Notice(source=source, monotonic_s=time.monotonic() if came_s is None else came_s)
            notice = self._notice
        self._on_notice(notice)

    def read_notice(self) -> Notice | None:
        """The notice, if there is one by now: a signal that came before this call counts."""
        if self._started:
            signal_watcher.process_pending_signals()
        return self._notice

    def close(self) -> None:
        """Nothing is called any more. Signals go where they went before, unless there is a notice."""
        if not self._started:
            return
        signal_watcher.process_pending_signals()
        with self._checking:
            self._closed = True
        signal_watcher.remove_listener(self, keep_handler=self._notice is not None, handled_s=self._sigterm_s)

    def check_notices(self, sigterm_s: float | None, *, was_handled: bool) -> None:
        with self._checking:
            if not self._closed:
                self._run_guarded(lambda: self._check_sources(sigterm_s, was_handled))
                self._run_guarded(self._on_tick)

    def forget_after_fork(self) -> None:
        self._closed = True
        self._checking = threading.RLock()

    def _check_sources(self, sigterm_s: float | None, was_handled: bool) -> None:
        if self.wants_sigterm and sigterm_s is not None and (sigterm_s >= self._made_s or was_handled):
            if self._sigterm_s is None:
                self._sigterm_s = sigterm_s
            self.record_notice("sigterm", sigterm_s)
        if self._trigger is not None and self._notice is None and self._trigger.exists():
            self.record_notice("file")

    def _run_guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            if repr(error) != self._complaint:
                self._complaint = repr(error)
                _log.exception("the watcher for notices goes on after this")
