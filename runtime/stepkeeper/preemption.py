"""Notices: what asks this process to save and stop. Level-triggered: once there, a notice stays.

Python runs signal handlers between two bytecodes of the main thread, so a main thread inside a long compilation or
collective delays them. The wakeup file descriptor is written by the signal itself, and a thread of ours reads it.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final
from weakref import WeakSet

from stepkeeper.loggers import logger

__all__ = ["Notice", "NoticeWatcher"]

_log: Final = logger(__name__)
_TICK_MILLIS: Final = 200
_SETTLE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    source: str
    """sigterm, file, directive, call or peer."""

    monotonic_s: float
    """When it came, by time.monotonic()."""


_watchers: "WeakSet[NoticeWatcher]" = WeakSet()


_forking = threading.local()


def _before_fork() -> None:
    """SIGTERM waits while this thread forks.

    A forked data-loader worker that is terminated must die of it. Were it hit before it had let go, it would survive,
    and the byte in the pipe that it shares with its parent would look like a notice there.
    """
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    for watcher in tuple(_watchers):
        watcher.let_go()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


class NoticeWatcher:
    """Collects notices from SIGTERM, a trigger file and calls; the first one counts.

    `on_tick` runs five times a second in the watcher's thread. What it or `on_notice` raises is logged: the thread
    lives as long as the watcher, or the next SIGTERM would be for nobody.
    """

    def __init__(
        self, trigger: Path | None, on_tick: Callable[[], None], on_notice: Callable[[Notice], None]
    ) -> None:
        self._trigger = trigger
        self._on_tick = on_tick
        self._on_notice = on_notice
        self._notice: Notice | None = None
        self._lock = threading.Lock()
        self._wakeup_read_fd, self._wakeup_write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handler_before: Callable[[int, FrameType | None], object] | int | None = None
        self._wakeup_before = -1
        self._installed = False
        self._handled = False
        self._handler_exit: SystemExit | None = None
        self._complaint = ""
        self._round_ended = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._watch, name="notices", daemon=True)

    @property
    def notice(self) -> Notice | None:
        return self._notice

    def start(self, *, signals: bool) -> None:
        """Notices are collected from now on; SIGTERM's too if `signals` and this is the main thread."""
        if signals and threading.current_thread() is threading.main_thread():
            self._handler_before = signal.signal(signal.SIGTERM, self._handle)
            self._wakeup_before = signal.set_wakeup_fd(self._wakeup_write_fd, warn_on_full_buffer=False)
            self._installed = True
            _watchers.add(self)
        self._thread.start()

    def give(self, source: str) -> None:
        """There is a notice, from `source` if it is the first."""
        with self._lock:
            if self._notice is not None:
                return
            self._notice = Notice(source=source, monotonic_s=time.monotonic())
            notice = self._notice
        self._on_notice(notice)

    def settled(self) -> Notice | None:
        """The notice, if there is one by now: a signal that came before this call counts."""
        # The round that ends first may have looked before the signal came; the next one has not.
        for _ in range(2):
            self._round_ended.clear()
            self._poke()
            self._round_ended.wait(_SETTLE_S)
        return self._notice

    def close(self) -> None:
        """The thread has ended; signals go where they went before, unless there is a notice.

        A process that was told to stop is not to die of being told again while it shuts down.
        """
        self._closing = True
        self._poke()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        if self._notice is None and threading.current_thread() is threading.main_thread():
            self.let_go()

    def let_go(self) -> None:
        """Signals go where they went before `start`; called by the main thread, also of a forked child."""
        if not self._installed:
            return
        self._installed = False
        # Somebody who installed a handler after us keeps it.
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._handler_before or signal.SIG_DFL)
        current = signal.set_wakeup_fd(self._wakeup_before, warn_on_full_buffer=False)
        if current != self._wakeup_write_fd:
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    def _poke(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wakeup_write_fd, b"\0")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The wakeup byte has told the watcher, unless somebody took the wakeup descriptor away, as asyncio's loop does
        # when it ends. Taking the watcher's lock here could deadlock with the main thread.
        self._handled = True
        self._poke()
        if callable(self._handler_before):
            try:
                self._handler_before(number, frame)
            except SystemExit as error:
                # The end is ours to choose: at a step that all ranks save. The watcher logs it, a handler must not.
                self._handler_exit = error

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wakeup_read_fd, select.POLLIN)
        while not self._closing:
            if poll.poll(_TICK_MILLIS):
                self._guarded(self._read_wakeups)
            self._guarded(self._look)
            self._guarded(self._on_tick)
            self._round_ended.set()
        # A signal that came with the end.
        self._guarded(self._look)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            if repr(error) != self._complaint:
                self._complaint = repr(error)
                _log.exception("the watcher for notices goes on after this")

    def _look(self) -> None:
        left, self._handler_exit = self._handler_exit, None
        if left is not None:
            _log.warning(
                "the SIGTERM handler that was there before wants exit code %s: stop follows", left.code
            )
        if self._handled:
            self.give("sigterm")
        if self._trigger is not None and self._notice is None and self._trigger.exists():
            self.give("file")

    def _read_wakeups(self) -> None:
        signals = os.read(self._wakeup_read_fd, 4096).replace(b"\0", b"")
        if self._wakeup_before >= 0 and signals:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wakeup_before, signals)
        if signal.SIGTERM in signals:
            self.give("sigterm")
