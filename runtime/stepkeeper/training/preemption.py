"""Notices: what asks this process to save and stop. Level-triggered: once there, a notice stays."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stepkeeper.loggers import logger
from stepkeeper.training.signals import watch

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
        self.hears_signals = False
        self._trigger = trigger
        self._on_tick = on_tick
        self._on_notice = on_notice
        self._notice: Notice | None = None
        self._terminated_s: float | None = None
        """When SIGTERM came that is, or would have been, the notice: what it came behind may have been another one."""

        self._lock = threading.Lock()
        self._complaint = ""
        self._looking = threading.RLock()
        self._started = self._closed = False
        # What came before is no notice here, also where the thread has yet to read of it.
        watch.settle()
        self._made_s = time.monotonic()

    @property
    def notice(self) -> Notice | None:
        return self._notice

    @property
    def is_deaf(self) -> bool:
        """SIGTERM is to be a notice here, and nobody has taken it: no call has come in the main thread."""
        return self.hears_signals and not self._closed and not watch.has_signals

    def start(self, *, signals: bool) -> None:
        """Notices are collected from now on; SIGTERM's too if `signals` and this is the main thread.

        Called again, in the main thread, it makes up for a call in another one.

        A SIGTERM that came before, while another watcher kept it from ending the process, is a notice here too; and
        whenever it came, where another watcher has ended with it as its notice: the process is to end all the same.
        """
        self.hears_signals, self._started = signals, True
        watch.join(self)

    def give(self, source: str, came_s: float | None = None) -> None:
        """There is a notice, from `source` if it is the first. It came now, or at `came_s` by time.monotonic()."""
        with self._lock:
            if self._notice is not None:
                return
            self._notice = Notice(source=source, monotonic_s=time.monotonic() if came_s is None else came_s)
            notice = self._notice
        self._on_notice(notice)

    def settled(self) -> Notice | None:
        """The notice, if there is one by now: a signal that came before this call counts."""
        if self._started:
            watch.settle()
        return self._notice

    def close(self) -> None:
        """Nothing is called any more. Signals go where they went before, unless there is a notice."""
        if not self._started:
            return
        watch.settle()
        with self._looking:
            self._closed = True
        watch.part(self, keeps_signals=self._notice is not None, heeded_s=self._terminated_s)

    def look(self, terminated_s: float | None, *, heeded: bool) -> None:
        with self._looking:
            if not self._closed:
                self._guarded(lambda: self._look(terminated_s, heeded))
                self._guarded(self._on_tick)

    def disown(self) -> None:
        self._closed = True
        self._looking = threading.RLock()

    def _look(self, terminated_s: float | None, heeded: bool) -> None:
        if self.hears_signals and terminated_s is not None and (terminated_s >= self._made_s or heeded):
            if self._terminated_s is None:
                self._terminated_s = terminated_s
            self.give("sigterm", terminated_s)
        if self._trigger is not None and self._notice is None and self._trigger.exists():
            self.give("file")

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            if repr(error) != self._complaint:
                self._complaint = repr(error)
                _log.exception("the watcher for notices goes on after this")
