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
    `on_first` are logged, since without the thread nothing would notice the next SIGTERM.
    """

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

        self._sigterm_s: float | None = None
        """Time of the SIGTERM that is a notice here, or would be one without an earlier notice."""

        self._lock = threading.RLock()
        self._complaint = ""
        """The last logged error of a callback: five times a second is too often for the same one."""

        self._checking = threading.RLock()
        self._started = self._closed = False
        # An earlier signal is no notice here, even if the thread hasn't read it yet.
        signal_watcher.process_pending_signals()
        self._made_s = time.monotonic()

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
        return self.wants_sigterm and not self._closed and not signal_watcher.handles_sigterm

    def start(self, *, signals: bool) -> None:
        """Start to watch, including SIGTERM if `signals` is set and this is the main thread.

        After a first call in another thread, a later one in the main thread adds SIGTERM. If another manager closed
        with SIGTERM as its notice, that is a notice here whenever it came: the process still has to end.
        """
        if not signals:
            # Before this object listens: the watcher releases SIGTERM when its last listener leaves.
            leave_notices_to_manager()
        self.wants_sigterm, self._started = signals, True
        signal_watcher.add_listener(self)
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
        if self._started:
            signal_watcher.process_pending_signals()
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
        if self._started and self.wants_sigterm and self.first is None:
            signal_watcher.keep_exit_code(code)

    def close(self) -> None:
        """Stop watching. The earlier signal handling is restored, unless there is a notice."""
        if not self._started:
            return
        signal_watcher.process_pending_signals()
        with self._checking:
            self._closed = True
        signal_watcher.remove_listener(
            self, keep_handler=self.wants_sigterm and self.first is not None, handled_s=self._sigterm_s
        )

    def check_notices(self, sigterm_s: float | None, *, was_handled: bool) -> None:
        """Check for a notice and call `on_tick`. The process's signal watcher calls this five times a second."""
        with self._checking:
            if not self._closed:
                self._run_guarded(lambda: self._check_sources(sigterm_s, was_handled))
                self._run_guarded(self._on_tick)

    def forget_after_fork(self) -> None:
        """Close this copy in a forked child, which may not have the thread that held the lock."""
        self._closed = True
        self._checking = threading.RLock()

    def _check_sources(self, sigterm_s: float | None, was_handled: bool) -> None:
        # A signal from before this manager counts only if it stopped another manager: see `start`.
        if self.wants_sigterm and sigterm_s is not None and (sigterm_s >= self._made_s or was_handled):
            if self._sigterm_s is None:
                self._sigterm_s = sigterm_s
            self.record(NoticeSource.SIGTERM, sigterm_s)
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
