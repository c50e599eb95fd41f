"""Hold the notices to save and stop that a manager's process got, and the time that they leave."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from stepkeeper.contract import NoticeSource
from stepkeeper.ending.before_manager import leave_notices_to_manager
from stepkeeper.ending.schedule import Notice, Schedule
from stepkeeper.ending.signals import signal_watcher
from stepkeeper.errors import NoticeDeadlineError, PeerLostError
from stepkeeper.loggers import logger, run_briefly

__all__ = ["Notices"]

_log: Final = logger(__name__)


class Notices:
    """Collect notices from SIGTERM, a trigger file and callers. A notice stays. Any thread may call this.

    `on_tick` runs five times a second, in the thread that all managers of the process share. Errors of `on_tick` and
    `on_first` are logged there, since without the thread nothing would notice the next SIGTERM.
    """

    is_manager = True

    def __init__(
        self,
        schedule: Schedule,
        *,
        trigger: Path | None,
        on_first: Callable[[Notice], None],
        on_tick: Callable[[], None],
    ) -> None:
        """Start without a notice; nothing is watched before `start`.

        `on_first` is called once, with the first notice, in the thread that recorded it. `trigger` is a file whose
        existence is a notice, if any.
        """
        self.wants_sigterm = False
        self._schedule = schedule
        self._trigger = trigger
        self._on_first = on_first
        self._on_tick = on_tick
        self._has_started: Callable[[], bool] = lambda: True
        """Returns False only within `starting`, until all ranks have started."""

        self._lock = threading.RLock()
        self._ticking = threading.RLock()
        self._is_closed = False
        self._complaint = ""
        """The last logged error of a callback: five times a second is too often for the same one."""

    @property
    def schedule(self) -> Schedule:
        """The current time limits of this process, by the notices so far."""
        return replace(self._schedule, now_s=time.monotonic(), is_starting=not self._has_started())

    @property
    def first(self) -> Notice | None:
        """The first notice, if one has come."""
        return next(iter(self._schedule.notices), None)

    @property
    def misses_sigterm(self) -> bool:
        """True if SIGTERM is wanted but not handled yet, since no call came from the main thread."""
        return self.wants_sigterm and not signal_watcher.handles_sigterm

    def start(self, *, signals: bool) -> None:
        """Start to watch, including SIGTERM if `signals` is set and this is the main thread.

        After a first call in another thread, a later one in the main thread adds SIGTERM. If SIGTERM was a notice to
        an earlier manager, that is a notice here too: the process still has to end.
        """
        self.wants_sigterm = signals
        signal_watcher.add(self)
        # After this object listens, so that the watcher keeps SIGTERM in between.
        leave_notices_to_manager()

    def record(self, source: NoticeSource, came_s: float | None = None, *, kills: bool = True) -> None:
        """Record the first notice of each source. `kills` is False if the process isn't killed after it."""
        came_s = time.monotonic() if came_s is None else came_s
        notice = Notice(source=source, monotonic_s=came_s, kills=kills)
        with self._lock:
            is_first = not self._schedule.notices
            self._schedule = self._schedule.with_notice(notice)
        if is_first:
            self._on_first(notice)

    def read_first(self) -> Notice | None:
        """Return the first notice, if any. A signal before this call counts."""
        self._run_guarded(self._check_sigterm)
        return self.first

    def wait_left_s(self, progress_s: float) -> float | None:
        """Return the seconds left to a wait with its last progress at `progress_s`; None without limit."""
        return self.schedule.wait_left_s(progress_s)

    @contextmanager
    def starting(self, has_started: Callable[[], bool]) -> Iterator[None]:
        """End the block's waits soon after a notice until `has_started`: there is nothing to save.

        Raises NoticeDeadlineError if a notice ended a wait, or another rank with a notice has left before.
        """
        self._has_started = has_started
        try:
            yield
        except PeerLostError as error:
            if self._schedule.killer_s is None or has_started():
                raise
            raise NoticeDeadlineError(
                f"this rank was asked to stop before all ranks had started, and another rank has left: {error}"
            ) from error
        finally:
            self._has_started = lambda: True

    def keep_exit_code(self, code: int) -> None:
        """End this process, which is about to exit, with `code` even if SIGTERM comes now."""
        # After a notice, `close` keeps the handler anyway.
        if self.wants_sigterm and self.first is None:
            signal_watcher.keep_exit_code(code)

    def close(self) -> None:
        """Stop watching. The earlier signal handling is restored, unless there is a notice."""
        has_notice = self.read_first() is not None
        signal_watcher.remove(self, is_ending=self.wants_sigterm and has_notice)
        with self._ticking:
            self._is_closed = True

    def on_tick(self) -> None:
        """Check for notices, and run the periodic checks. The process's signal watcher calls this."""
        with self._ticking:
            for check in () if self._is_closed else (self._check_sigterm, self._check_trigger, self._on_tick):
                self._run_guarded(check)

    def _check_sigterm(self) -> None:
        if self.wants_sigterm and (came_s := signal_watcher.read_sigterm()) is not None:
            self.record(NoticeSource.SIGTERM, came_s)

    def _check_trigger(self) -> None:
        if self._trigger is not None and self.first is None and self._trigger.exists():
            self.record(NoticeSource.FILE)

    def _run_guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            if repr(error) != self._complaint:
                self._complaint = repr(error)
                text = "watching for notices continues after this error"
                run_briefly(partial(_log.error, text, exc_info=error))
