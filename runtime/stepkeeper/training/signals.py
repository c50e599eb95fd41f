"""What all managers of a process share: one thread that looks for notices, and one hold on SIGTERM.

Managers are held weakly: who drops one without closing it has nothing left of it here, however many there were. Python
runs signal handlers between two bytecodes of the main thread, so a main thread inside a long compilation or collective
delays them. The wakeup file descriptor is written by the signal itself, and the thread reads it.
"""

import contextlib
import os
import select
import signal
import threading
import time
from typing import Final, Protocol
from weakref import ref

from stepkeeper.loggers import logger
from stepkeeper.training.sigterm_handler import SigtermHandler

__all__ = ["NoticeListener", "SignalWatcher", "signal_watcher"]

_log: Final = logger(__name__)
_TICK_MILLIS: Final = 200
_SETTLE_S: Final = 1.0


class NoticeListener(Protocol):
    """Whom the signal_watcher works for, from `join` to `part`, or until nobody else has it any more."""

    wants_sigterm: bool
    """SIGTERM is its notice, and doesn't end the process meanwhile."""

    def check_notices(self, sigterm_s: float | None, *, was_handled: bool) -> None:
        """Called five times a second, in the watch's thread. SIGTERM came at `sigterm_s`, if it did.

        `was_handled`: another listener has ended with it as its notice. If not, this is when it came last.
        """
        ...

    def forget_after_fork(self) -> None:
        """It is the parent's: this is a forked child."""
        ...


class SignalWatcher:
    """One for the process: `watch`. What handlers read of it is replaced as a whole: they may take no lock."""

    def __init__(self) -> None:
        self._exit_requested: SystemExit | None = None
        """What the handler that was there before raised."""

        self._sigterm_s: float | None = None
        """When its byte was read, or its handler ran: long afterwards, if the main thread was in a long compilation."""

        self._handled_s: float | None = None
        self._listeners: tuple[ref[NoticeListener], ...] = ()
        self._lock = threading.RLock()
        self._round = threading.Condition()
        self._n_rounds = 0
        self._thread: threading.Thread | None = None
        self._read_fd = self._write_fd = -1
        self._handler: SigtermHandler | None = None
        self._wakeup_before = -1

    @property
    def handles_sigterm(self) -> bool:
        """SIGTERM is taken: it is a notice of those who hear signals."""
        return self._handler is not None

    @property
    def is_permanent(self) -> bool:
        """SIGTERM has been handled, and will be for as long as this process lives."""
        handler = self._handler
        return handler is not None and handler.is_permanent

    def add_listener(self, listener: NoticeListener) -> None:
        """`listener` is looked after. SIGTERM is taken if it hears signals, and this is the main thread."""
        with self._lock:
            others = (each for each in self._living_listeners() if each() is not listener)
            self._listeners = (*others, ref(listener))
            if self._thread is None:
                self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
                self._thread.start()
            if listener.wants_sigterm and threading.current_thread() is threading.main_thread():
                self._take_sigterm()
        # The thread may wait for nothing but signals.
        self._wake_thread()

    def remove_listener(
        self, listener: NoticeListener, *, keep_handler: bool, handled_s: float | None
    ) -> None:
        """`listener` is looked after no more. Behind the last one the thread ends, and signals go where they went.

        Unless one `keep_handler`. Those to come are told that SIGTERM came at `handled_s`, if it had.
        """
        with self._lock:
            self._listeners = tuple(each for each in self._living_listeners() if each() is not listener)
            if self._handler is not None and keep_handler:
                # In this order: the thread reads them in the other one.
                self._handled_s = handled_s if self._handled_s is None else self._handled_s
                self._handler.is_permanent = True
            is_last = not self._listeners
            if is_last and not self.is_permanent and threading.current_thread() is threading.main_thread():
                self._release_sigterm()
            ended_thread = self._thread if is_last and self._handler is None else None
        self._wake_thread()
        if ended_thread is not None and ended_thread is not threading.current_thread():
            # Not for ever: another thread may have found it a new listener.
            ended_thread.join(_SETTLE_S)

    def record_sigterm(self) -> bool:
        """In a handler: SIGTERM has come. False if it is nobody's notice."""
        self._sigterm_s = time.monotonic()
        found = [each() for each in self._listeners]
        # The wakeup byte has told the thread, unless somebody took the wakeup descriptor away, as asyncio's loop does
        # when it ends.
        self._wake_thread()
        return any(each is not None and each.wants_sigterm for each in found)

    def record_exit(self, error: SystemExit) -> None:
        """Note, inside a signal handler, that the previous handler asked to exit: the thread logs it."""
        self._exit_requested = error

    def process_pending_signals(self) -> None:
        """A signal that came before this call was heard."""
        # The round that ends first may have looked before the signal came; the next one has not.
        self._await_round()
        self._await_round()

    def after_fork_in_child(self) -> None:
        """The child has none of it: no thread, no hold on signals, and no end of the pipe that it shares."""
        self._release_sigterm()
        for each in self._living_listeners():
            if (listener := each()) is not None:
                listener.forget_after_fork()
        for fd in (self._read_fd, self._write_fd):
            if fd >= 0:
                os.close(fd)
        self._lock, self._round = threading.RLock(), threading.Condition()
        self._read_fd = self._write_fd = -1
        self._thread, self._listeners = None, ()
        self._sigterm_s = self._handled_s = None

    def _await_round(self) -> None:
        if self._thread is None or self._thread is threading.current_thread():
            return
        with self._round:
            wanted = self._n_rounds + 1
            self._wake_thread()
            self._round.wait_for(lambda: self._n_rounds >= wanted, _SETTLE_S)

    def _living_listeners(self) -> tuple[ref[NoticeListener], ...]:
        return tuple(each for each in self._listeners if each() is not None)

    def _take_sigterm(self) -> None:
        if self._handler is None or signal.getsignal(signal.SIGTERM) is not self._handler:
            self._handler = SigtermHandler(self.record_sigterm, self.record_exit)
        before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if before != self._write_fd:
            self._wakeup_before = before

    def _release_sigterm(self) -> None:
        """Called by the main thread, also of a forked child."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        handler.uninstall()
        current = signal.set_wakeup_fd(-1)
        if current == self._write_fd:
            current = self._wakeup_before
        self._wakeup_before = -1
        with contextlib.suppress(OSError, ValueError):  # whoever had it has closed it
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: there is no thread to wake
            os.write(self._write_fd, b"\0")

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        while True:
            if poll.poll(_TICK_MILLIS if self._listeners else None):
                self._read_wakeups()
            self._notify_listeners()
            with self._round:
                self._n_rounds += 1
                self._round.notify_all()
            with self._lock:
                self._listeners = self._living_listeners()
                if not self._listeners and self._handler is None:
                    ours = self._read_fd, self._write_fd
                    self._read_fd = self._write_fd = -1
                    self._thread = None
                    os.close(ours[0])
                    os.close(ours[1])
                    return

    def _notify_listeners(self) -> None:
        """A function of its own: while the thread waits, it holds no listener."""
        left, self._exit_requested = self._exit_requested, None
        if left is not None:
            _log.warning(
                "the SIGTERM handler that was there before wants exit code %s: stop follows", left.code
            )
        was_handled = self.is_permanent
        came_s = self._sigterm_s if not was_handled or self._handled_s is None else self._handled_s
        for each in self._listeners:
            if (listener := each()) is not None:
                listener.check_notices(came_s, was_handled=was_handled)

    def _read_wakeups(self) -> None:
        signals = os.read(self._read_fd, 4096).replace(b"\0", b"")
        if self._wakeup_before >= 0 and signals:
            with contextlib.suppress(OSError):  # full, or closed by whoever had it
                os.write(self._wakeup_before, signals)
        if signal.SIGTERM in signals:
            self._sigterm_s = time.monotonic()


signal_watcher: Final = SignalWatcher()
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
    signal_watcher.after_fork_in_child()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
