"""Share one watching thread and one SIGTERM handler among all managers of a process.

Listeners are held weakly, so a manager may be dropped without being closed. Python runs signal handlers between two
bytecodes of the main thread, so a long compilation or collective there delays them. But the signal itself writes its
number to the wakeup file descriptor (`signal.set_wakeup_fd`): this is a pipe, which the thread reads at once.
"""

import atexit
import contextlib
import os
import select
import signal
import threading
import time
from functools import partial
from typing import Final, Protocol
from weakref import ref

from stepkeeper.ending.exits import ExitTimer
from stepkeeper.ending.sigterm_handler import SigtermHandler
from stepkeeper.loggers import logger, run_briefly

__all__ = ["NoticeListener", "SignalWatcher", "signal_watcher"]

_log: Final = logger(__name__)
_TICK_MILLIS: Final = 200
_ROUND_S: Final = 1.0
"""Seconds to wait for a round of the thread, or for its end. A listener may hang in one."""

_TIDY_S: Final = 5.0
"""Seconds that SIGTERM leaves to a process that is already ending for another reason."""


class NoticeListener(Protocol):
    """An object that the signal watcher calls from `add_listener` until `remove_listener`, or until it is dropped."""

    wants_sigterm: bool
    """True if SIGTERM is a notice to it, and must not end the process."""

    def check_notices(self, sigterm_s: float | None, *, was_handled: bool) -> None:
        """Check for notices. The signal watcher's thread calls this five times a second.

        `sigterm_s` is the time of the last SIGTERM, if any. `was_handled`: this process is ending already
        (`is_permanent`), and if a SIGTERM was another listener's notice, `sigterm_s` is that one's time.
        """

    def forget_after_fork(self) -> None:
        """Drop all state that belongs to the parent process. Called in a forked child."""


class SignalWatcher:
    """Watch for SIGTERM on behalf of all listeners of the process; `signal_watcher` is the only instance.

    The thread makes rounds: each processes the signals so far, and calls all listeners. Signal handlers must take no
    lock, so the state that they read is never changed in place, only replaced.
    """

    def __init__(self) -> None:
        self._listeners: tuple[ref[NoticeListener], ...] = ()
        self._lock = threading.RLock()
        self._handler: SigtermHandler | None = None
        self._sigterm_s: float | None = None
        """Time at which the signal's byte was read, or its handler ran. Both may be late."""

        self._handled_s: float | None = None
        """Time of the SIGTERM that was the notice of a closed listener."""

        self._exit_code: int | None = None
        """The code with which this process is about to exit, with or without SIGTERM; None before."""

        self._thread: threading.Thread | None = None
        self._round = threading.Condition()
        self._n_rounds = 0
        self._read_fd = self._write_fd = -1
        self._wakeup_before = -1
        """The program's own wakeup descriptor, to which signals are passed on; -1 without one."""

        self._logged: set[str] = set()

    @property
    def handles_sigterm(self) -> bool:
        """True if the listeners that want SIGTERM get it."""
        return self._handler is not None

    @property
    def is_permanent(self) -> bool:
        """True if this process handles SIGTERM until it ends: it is ending, after a notice or with a kept exit code."""
        handler = self._handler
        return handler is not None and handler.is_permanent

    def add_listener(self, listener: NoticeListener) -> None:
        """Call `listener` from now on. Take SIGTERM if the listener wants it and this is the main thread."""
        with self._lock:
            if self._exit_code is not None and self._handler is not None:
                # The program caught the exception that should have ended it, and continues.
                self._exit_code, self._handler.is_permanent = None, False
            others = (each for each in self._living_listeners() if each() is not listener)
            self._listeners = (*others, ref(listener))
            if self._thread is None:
                self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
                self._thread.start()
            if listener.wants_sigterm and threading.current_thread() is threading.main_thread():
                self._take_sigterm()
        self._wake_thread()

    def remove_listener(
        self, listener: NoticeListener, *, keep_handler: bool, handled_s: float | None
    ) -> None:
        """Stop calling `listener`. After the last one, the thread ends and the earlier handling is restored.

        `keep_handler`: it had a notice, so SIGTERM stays handled until the process ends. `handled_s` is the time of
        that notice's SIGTERM, if one came, for later listeners.
        """
        with self._lock:
            self._listeners = tuple(each for each in self._living_listeners() if each() is not listener)
            if self._handler is not None and keep_handler:
                # In this order: the thread, which reads them without the lock, reads the flag first.
                self._handled_s = handled_s if self._handled_s is None else self._handled_s
                self._handler.is_permanent = True
            is_last = not self._listeners
            if is_last and not self.is_permanent and threading.current_thread() is threading.main_thread():
                self._release_sigterm()
            # With a handler the thread stays: it reads the wakeup descriptor, and takes SIGTERM back from C code.
            ended_thread = self._thread if is_last and self._handler is None else None
        self._wake_thread()
        if ended_thread is not None and ended_thread is not threading.current_thread():
            # With a limit: another thread may have added a listener meanwhile, for which it continues.
            ended_thread.join(_ROUND_S)

    def keep_exit_code(self, code: int) -> None:
        """Make SIGTERM from now on only hasten the end of this process, which is about to exit with `code`."""
        with self._lock:
            if self._handler is not None:
                self._exit_code = code
                self._handler.is_permanent = True

    def is_wanted_besides(self, *kinds: type[NoticeListener]) -> bool:
        """Return True if SIGTERM is a notice to a listener of another kind than these."""
        found = [each() for each in self._listeners]
        return any(each is not None and not isinstance(each, kinds) and each.wants_sigterm for each in found)

    def process_pending_signals(self) -> None:
        """Wait until the listeners have processed every signal before this call, for two seconds at most."""
        # The first round to end may have begun before the signal; the second begins after it.
        self._await_round()
        self._await_round()

    def ignore_further_sigterms(self) -> None:
        """Ignore SIGTERM while the interpreter is finalized, in a process that ends because of a notice.

        Python removes its handlers then, and the signal would kill the process instead of its exit code standing.
        """
        if self.is_permanent and isinstance(signal.getsignal(signal.SIGTERM), SigtermHandler):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def forget_after_fork(self) -> None:
        """Release everything in a forked child, which has no thread and must not use its parent's pipe."""
        self._release_sigterm()
        for each in self._living_listeners():
            if (listener := each()) is not None:
                listener.forget_after_fork()
        self._close_pipe()
        self._lock, self._round = threading.RLock(), threading.Condition()
        self._thread, self._listeners = None, ()
        self._sigterm_s = self._handled_s = self._exit_code = None

    def _on_sigterm(self) -> bool:
        """Record SIGTERM, inside a signal handler. Return False if no listener wants it."""
        self._sigterm_s = time.monotonic()
        if self._exit_code is not None:
            ExitTimer(self._exit_code, self._sigterm_s + _TIDY_S)
        # The wakeup byte wakes the thread too, unless other code took the wakeup descriptor, as asyncio's
        # loop does at its end.
        self._wake_thread()
        return self.is_wanted_besides()

    def _await_round(self) -> None:
        if self._thread is None or self._thread is threading.current_thread():
            return
        with self._round:
            wanted = self._n_rounds + 1
            self._wake_thread()
            self._round.wait_for(lambda: self._n_rounds >= wanted, _ROUND_S)

    def _living_listeners(self) -> tuple[ref[NoticeListener], ...]:
        return tuple(each for each in self._listeners if each() is not None)

    def _take_sigterm(self) -> None:
        if self._handler is None or signal.getsignal(signal.SIGTERM) is not self._handler:
            self._handler = SigtermHandler(self._on_sigterm)
        before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if before != self._write_fd:
            self._wakeup_before = before

    def _release_sigterm(self) -> None:
        """Uninstall the handler and restore the wakeup descriptor, in the main thread, also of a forked child."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        handler.uninstall()
        current = signal.set_wakeup_fd(-1)
        # Another descriptor is one that the program has set since: it stays.
        restored = self._wakeup_before if current == self._write_fd else current
        self._wakeup_before = -1
        with contextlib.suppress(OSError, ValueError):  # its owner has closed it
            signal.set_wakeup_fd(restored, warn_on_full_buffer=False)

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):  # full: the thread is awake; closed: there is no thread
            os.write(self._write_fd, b"\0")

    def _close_pipe(self) -> None:
        both_ends, self._read_fd, self._write_fd = (self._read_fd, self._write_fd), -1, -1
        for fd in both_ends:
            if fd >= 0:
                os.close(fd)

    def _run(self) -> None:
        """Make rounds until there is no listener and no handler. Runs in the thread."""
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        while True:
            # Without listeners, only signals matter.
            if poll.poll(_TICK_MILLIS if self._listeners else None):
                self._read_wakeups()
            self._take_back_sigterm()
            self._notify_listeners()
            with self._round:
                self._n_rounds += 1
                self._round.notify_all()
            with self._lock:
                self._listeners = self._living_listeners()
                if not self._listeners and self._handler is None:
                    self._thread = None
                    self._close_pipe()
                    return

    def _take_back_sigterm(self) -> None:
        # With the lock: a handler that the main thread is uninstalling must not be restored.
        with self._lock:
            handler = self._handler
            is_taken_back = handler is not None and handler.take_back()
        if handler is not None and is_taken_back:
            who = "both get SIGTERM" if handler.calls_displaced else "only the training gets SIGTERM"
            text = f"C code, such as torch_xla, had replaced the SIGTERM handler: {who} from now on"
            if text not in self._logged:
                self._logged.add(text)
                run_briefly(partial(_log.info, text))

    def _notify_listeners(self) -> None:
        """Call the listeners. This is a separate function so that the thread holds no listener while it waits."""
        was_handled = self.is_permanent
        came_s = self._sigterm_s
        if was_handled and self._handled_s is not None:
            came_s = self._handled_s
        for each in self._listeners:
            if (listener := each()) is not None:
                listener.check_notices(came_s, was_handled=was_handled)

    def _read_wakeups(self) -> None:
        # Each byte is a signal's number, or 0 from `_wake_thread`.
        signals = os.read(self._read_fd, 4096).replace(b"\0", b"")
        if self._wakeup_before >= 0 and signals:
            with contextlib.suppress(OSError):  # full, or its owner has closed it
                os.write(self._wakeup_before, signals)
        if signal.SIGTERM in signals:
            self._sigterm_s = time.monotonic()


signal_watcher: Final = SignalWatcher()
_forking = threading.local()


def _before_fork() -> None:
    """Block SIGTERM while this thread forks: it must kill the child, such as a data-loader worker.

    Before the child has released the handler, the signal would only write to the pipe that it shares with its parent:
    the child would survive, and the parent would have a notice.
    """
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    signal_watcher.forget_after_fork()
    _after_fork()


atexit.register(signal_watcher.ignore_further_sigterms)
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
