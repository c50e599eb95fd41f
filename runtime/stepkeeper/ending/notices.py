"""Hold the notices that ask a manager's process to save and stop, and the time that they leave."""

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
from stepkeeper.loggers import logger, tell_briefly

__all__ = ["Notices"]

_log: Final = logger(__name__)


class Notices:
    """Collect notices from SIGTERM, a trigger file and callers. Once there, a notice stays. Any thread may call this.

    `on_tick` runs five times a second, in the thread that all managers of the process share. Errors that `on_tick` or
    `on_first` raise are logged and don't end that thread: nothing would hear the next SIGTERM.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        trigger: Path | None,
        on_first: Callable[[Notice], None],
        on_tick: Callable[[], None],
    ) -> None:
        """Construct without a notice; nothing is watched before `start`.

        Args:
            schedule: The time limits of this process.
            trigger: A file whose existence is a notice; None for no such file.
            on_first: Called once, with the first notice, in the thread where it came up.
            on_tick: Called five times a second while watching.

        """
        self.wants_sigterm = False
        self._schedule = schedule
        self._trigger = trigger
        self._on_first = on_first
        self._on_tick = on_tick
        self._has_started: Callable[[], bool] = lambda: True
        self._sigterm_s: float | None = None
        """Time of the SIGTERM that is a notice here, or would be if another notice hadn't come first."""

        self._lock = threading.RLock()
        self._complaint = ""
        self._checking = threading.RLock()
        self._started = self._closed = False
        # A signal that came before is no notice here, also if the thread hasn't read of it yet.
        signal_watcher.process_pending_signals()
        self._made_s = time.monotonic()

    @property
    def schedule(self) -> Schedule:
        """The time limits of this process, by the notices so far, at this moment."""
        return replace(self._schedule, now_s=time.monotonic(), is_starting=not self._has_started())

    @property
    def first(self) -> Notice | None:
        """The first notice, if one has come."""
        return next(iter(self._schedule.notices), None)

    @property
    def misses_sigterm(self) -> bool:
        """True if SIGTERM is wanted but not handled: no call has come in the main thread yet."""
        return self.wants_sigterm and not self._closed and not signal_watcher.handles_sigterm

    def start(self, *, signals: bool) -> None:
        """Start to watch; SIGTERM too if `signals` is set and this is the main thread.

        A later call, in the main thread, makes up for a first one in another thread. A SIGTERM that came earlier, while
        another manager kept it from ending the process, is a notice here too. If another manager has closed with
        SIGTERM as its notice, it is a notice here whenever it came: the process is still to end.
        """
        if not signals:
            # Before this one listens: SIGTERM goes where it went before the early notice.
            leave_notices_to_manager()
        self.wants_sigterm, self._started = signals, True
        signal_watcher.add_listener(self)
        leave_notices_to_manager()

    def hear(self, source: NoticeSource, came_s: float | None = None, *, kills: bool = True) -> None:
        """Record a notice, unless there is one from the same source already.

        Args:
            source: What asks.
            came_s: Time at which it came, by time.monotonic(); None means now.
            kills: False if no process is killed for it.

        """
        came_s = time.monotonic() if came_s is None else came_s
        notice = Notice(source=source, monotonic_s=came_s, kills=kills)
        with self._lock:
            is_first = not self._schedule.notices
            self._schedule = self._schedule.hear(notice)
        if is_first:
            self._on_first(notice)

    def read_first(self) -> Notice | None:
        """Return the first notice, if there is one by now: a signal that came before this call counts."""
        if self._started:
            signal_watcher.process_pending_signals()
        return self.first

    def wait_left_s(self, progress_s: float) -> float | None:
        """Return how many more seconds a wait may take whose last progress was at `progress_s`; None without limit."""
        return self.schedule.wait_left_s(progress_s)

    @contextmanager
    def starting(self, has_started: Callable[[], bool]) -> Iterator[None]:
        """End waits within soon after a notice while not `has_started`: there is nothing to save.

        Raises:
            NoticeDeadlineError: They have ended; or another rank that was asked to stop has left before.

        """
        self._has_started = has_started
        try:
            yield
        except PeerLostError as error:
            if self._schedule.killer_s is None or has_started():
                raise
            raise NoticeDeadlineError(
                f"this rank was asked to stop before all ranks had started, and another one has left: {error}"
            ) from error
        finally:
            self._has_started = lambda: True

    def keep_exit_code(self, code: int) -> None:
        """End this process with `code`, which follows in a moment, also if SIGTERM comes only now."""
        if self._started and self.wants_sigterm and self.first is None:
            signal_watcher.keep_exit_code(code)

    def close(self) -> None:
        """Stop watching. Signals go where they went before, unless there is a notice."""
        if not self._started:
            return
        signal_watcher.process_pending_signals()
        with self._checking:
            self._closed = True
        signal_watcher.remove_listener(
            self, keep_handler=self.wants_sigterm and self.first is not None, handled_s=self._sigterm_s
        )

    def check_notices(self, sigterm_s: float | None, *, was_handled: bool) -> None:
        """Look for a notice and call `on_tick`. The process's signal watcher calls this five times a second."""
        with self._checking:
            if not self._closed:
                self._run_guarded(lambda: self._check_sources(sigterm_s, was_handled))
                self._run_guarded(self._on_tick)

    def forget_after_fork(self) -> None:
        """Close this copy, in a forked child, which may not have the thread that held the lock."""
        self._closed = True
        self._checking = threading.RLock()

    def _check_sources(self, sigterm_s: float | None, was_handled: bool) -> None:
        if self.wants_sigterm and sigterm_s is not None and (sigterm_s >= self._made_s or was_handled):
            if self._sigterm_s is None:
                self._sigterm_s = sigterm_s
            self.hear(NoticeSource.SIGTERM, sigterm_s)
        if self._trigger is not None and self.first is None and self._trigger.exists():
            self.hear(NoticeSource.FILE)

    def _run_guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            if repr(error) != self._complaint:
                self._complaint = repr(error)
                said = "watching for notices continues after this error"
                tell_briefly(partial(_log.error, said, exc_info=error))
