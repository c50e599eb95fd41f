"""Collect notices, which ask this process to save and stop. Notices are level-triggered: once there, a notice stays."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from stepkeeper.loggers import logger, tell_briefly
from stepkeeper.training.notices.early_notice import leave_notices_to_manager
from stepkeeper.training.notices.signals import signal_watcher

__all__ = ["Notice", "NoticeWatcher"]

_log: Final = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A request to save and stop: where it came from, and when."""

    source: str
    """Name of the source: sigterm, file, directive, preempted, call or peer."""

    monotonic_s: float
    """Time at which it came, by time.monotonic()."""

    kills: bool = True
    """False if nobody kills a process for it: the program, or the operator, asks for the stop."""


class NoticeWatcher:
    """Collect notices from SIGTERM, a trigger file and calls. The first one makes the process stop.

    `on_tick` runs five times a second, in the thread that all watchers of the process share. Errors that `on_tick`
    or `on_notice` raise are logged and don't end the thread: otherwise nobody would see the next SIGTERM.
    """

    def __init__(
        self, trigger: Path | None, on_tick: Callable[[], None], on_notice: Callable[[Notice], None]
    ) -> None:
        """Create the watcher; it watches nothing before `start`.

        Args:
            trigger: A file whose existence is a notice; None for no such file.
            on_tick: Called five times a second while watching.
            on_notice: Called once, with the first notice, in the thread where it came up.

        """
        self.wants_sigterm = False
        self._trigger = trigger
        self._on_tick = on_tick
        self._on_notice = on_notice
        self._notices: tuple[Notice, ...] = ()
        self._sigterm_s: float | None = None
        """Time of the SIGTERM that is this watcher's notice, or would be if another notice hadn't come first."""

        self._lock = threading.Lock()
        self._complaint = ""
        self._checking = threading.RLock()
        self._started = self._closed = False
        # A signal that came before is no notice here, also if the thread hasn't read of it yet.
        signal_watcher.process_pending_signals()
        self._made_s = time.monotonic()

    @property
    def notice(self) -> Notice | None:
        """The notice, if one has come: of several the first."""
        return self._notices[0] if self._notices else None

    @property
    def notices(self) -> tuple[Notice, ...]:
        """The first notice of each source, in the order in which they came up: a later one may leave less time."""
        return self._notices

    @property
    def misses_sigterm(self) -> bool:
        """True if SIGTERM should be a notice here but nobody handles it: no call has come in the main thread yet."""
        return self.wants_sigterm and not self._closed and not signal_watcher.handles_sigterm

    def start(self, *, signals: bool) -> None:
        """Start to collect notices; SIGTERM too if `signals` is set and this is the main thread.

        A later call, in the main thread, makes up for a first call in another thread.

        A SIGTERM that came earlier, while another watcher kept it from ending the process, is a notice here too. If
        another watcher has closed with SIGTERM as its notice, that SIGTERM is a notice here whenever it came: the
        process is to end all the same.
        """
        if not signals:
            leave_notices_to_manager()
        self.wants_sigterm, self._started = signals, True
        signal_watcher.add_listener(self)
        leave_notices_to_manager()

    def record_notice(self, source: str, came_s: float | None = None, *, kills: bool = True) -> None:
        """Record a notice from `source`, unless there is one from it already.

        Args:
            source: sigterm, file, directive, preempted, call or peer.
            came_s: Time at which it came, by time.monotonic(); None means now.
            kills: False if nobody kills a process for it.

        """
        with self._lock:
            if any(notice.source == source for notice in self._notices):
                return
            came_s = time.monotonic() if came_s is None else came_s
            notice = Notice(source=source, monotonic_s=came_s, kills=kills)
            self._notices = (*self._notices, notice)
            is_first = self._notices[0] is notice
        if is_first:
            self._on_notice(notice)

    def read_notice(self) -> Notice | None:
        """Return the notice, if there is one by now: a signal that came before this call counts."""
        if self._started:
            signal_watcher.process_pending_signals()
        return self.notice

    def keep_exit_code(self, code: int) -> None:
        """Have this process end with `code` in a moment, also if SIGTERM comes only now. After a notice it does anyway.

        Args:
            code: The exit code, which says why the process ends.

        """
        if self._started and self.wants_sigterm and self.notice is None:
            signal_watcher.keep_exit_code(code)

    def close(self) -> None:
        """Stop watching: nothing is called any more. Signals go where they went before, unless there is a notice."""
        if not self._started:
            return
        signal_watcher.process_pending_signals()
        with self._checking:
            self._closed = True
        signal_watcher.remove_listener(self, keep_handler=self.notice is not None, handled_s=self._sigterm_s)

    def check_notices(self, sigterm_s: float | None, *, was_handled: bool) -> None:
        """Look for a notice and call `on_tick`. Called five times a second by the process's signal watcher."""
        with self._checking:
            if not self._closed:
                self._run_guarded(lambda: self._check_sources(sigterm_s, was_handled))
                self._run_guarded(self._on_tick)

    def forget_after_fork(self) -> None:
        """Close this copy of the watcher, in a forked child.

        The lock is made anew: the parent's may be held by a thread that the child doesn't have.
        """
        self._closed = True
        self._checking = threading.RLock()

    def _check_sources(self, sigterm_s: float | None, was_handled: bool) -> None:
        if self.wants_sigterm and sigterm_s is not None and (sigterm_s >= self._made_s or was_handled):
            if self._sigterm_s is None:
                self._sigterm_s = sigterm_s
            self.record_notice("sigterm", sigterm_s)
        if self._trigger is not None and self.notice is None and self._trigger.exists():
            self.record_notice("file")

    def _run_guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            if repr(error) != self._complaint:
                self._complaint = repr(error)
                said = "the watcher for notices goes on after this"
                tell_briefly(partial(_log.error, said, exc_info=error))
