"""Share one thread that looks for notices, and one SIGTERM handler, between all managers of a process.

Listeners are held weakly: a manager that is dropped without being closed leaves nothing behind here. Python runs signal
handlers between two bytecodes of the main thread, so a long compilation or collective there delays them. The signal
itself writes to the wakeup file descriptor, which the thread reads.
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
from stepkeeper.loggers import logger, tell_briefly

__all__ = ["NoticeListener", "SignalWatcher", "signal_watcher"]

_log: Final = logger(__name__)
_TICK_MILLIS: Final = 200
_SETTLE_S: Final = 1.0
_TIDY_S: Final = 5.0
"""Seconds that a process which ends for another reason has when SIGTERM comes: the signal alone leaves none."""


class NoticeListener(Protocol):
    """An object that the signal watcher calls, from `add_listener` to `remove_listener` or until it is dropped."""

    wants_sigterm: bool
    """True if SIGTERM is its notice and must not end the process meanwhile."""

    def check_notices(self, sigterm_s: float | None, *, was_handled: bool) -> None:
        """Look for notices. Called five times a second, in the signal watcher's thread.

        Args:
            sigterm_s: Time of the last SIGTERM by time.monotonic(); None if none came.
            was_handled: True if another listener has closed with SIGTERM as its notice; `sigterm_s` is that one's time.

        """
        ...

    def forget_after_fork(self) -> None:
        """Drop all state that belongs to the parent process. Called in a forked child."""
        ...


class SignalWatcher:
    """Watch for SIGTERM on behalf of all listeners of the process; `signal_watcher` is the only one.

    State that signal handlers read is replaced as a whole, because handlers may take no lock.
    """

    def __init__(self) -> None:
        self._listeners: tuple[ref[NoticeListener], ...] = ()
        self._lock = threading.RLock()
        self._handler: SigtermHandler | None = None
        self._sigterm_s: float | None = None
        """Time at which the signal's byte was read, or its handler ran, which may be late."""

        self._handled_s: float | None = None
        """Time of the SIGTERM that was the notice of a listener that has closed since."""

        self._exit_code: int | None = None
        """The code that this process ends with, with or without SIGTERM."""

        self._thread: threading.Thread | None = None
        self._round = threading.Condition()
        self._n_rounds = 0
        self._read_fd = self._write_fd = self._wakeup_before = -1
        self._said: set[str] = set()

    @property
    def handles_sigterm(self) -> bool:
        """True if SIGTERM goes to the listeners that want it."""
        return self._handler is not None

    @property
    def is_permanent(self) -> bool:
        """True if a listener closed with a notice: this process handles SIGTERM for as long as it lives."""
        handler = self._handler
        return handler is not None and handler.is_permanent

    def add_listener(self, listener: NoticeListener) -> None:
        """Call `listener` from now on. Take SIGTERM if the listener wants it and this is the main thread."""
        with self._lock:
            if self._exit_code is not None and self._handler is not None:
                # The program has caught the exception that was to end it, and continues.
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
        """Stop calling `listener`. After the last listener the thread ends, and signals go where they went before.

        Args:
            listener: The listener to remove.
            keep_handler: True if the listener had a notice: SIGTERM, if it is handled, stays so for good.
            handled_s: Time of the SIGTERM that came with that notice, for later listeners; None if none came.

        """
        with self._lock:
            self._listeners = tuple(each for each in self._living_listeners() if each() is not listener)
            if self._handler is not None and keep_handler:
                # In this order, because the thread reads them in the opposite one.
                self._handled_s = handled_s if self._handled_s is None else self._handled_s
                self._handler.is_permanent = True
            is_last = not self._listeners
            if is_last and not self.is_permanent and threading.current_thread() is threading.main_thread():
                self._release_sigterm()
            ended_thread = self._thread if is_last and self._handler is None else None
        self._wake_thread()
        if ended_thread is not None and ended_thread is not threading.current_thread():
            # Not without a limit: another thread may have added a listener meanwhile.
            ended_thread.join(_SETTLE_S)

    def keep_exit_code(self, code: int) -> None:
        """Let SIGTERM, from now on, only hurry the end of this process, which ends with `code` in a moment."""
        with self._lock:
            if self._handler is not None:
                self._exit_code = code
                self._handler.is_permanent = True

    def is_wanted_besides(self, *kinds: type[NoticeListener]) -> bool:
        """Return True if SIGTERM is the notice of a listener of none of these kinds."""
        found = [each() for each in self._listeners]
        return any(each is not None and not isinstance(each, kinds) and each.wants_sigterm for each in found)

    def process_pending_signals(self) -> None:
        """Wait until the listeners have seen every signal that came before this call, for two seconds at most."""
        # The first round to end may have looked before the signal came; the second has looked after it.
        self._await_round()
        self._await_round()

    def ignore_further_sigterms(self) -> None:
        """Ignore SIGTERM while the interpreter is finalized, in a process that ends because of a notice.

        Python gives up its handlers then, and the process would die of the signal instead of ending with its code.
        """
        if self.is_permanent and isinstance(signal.getsignal(signal.SIGTERM), SigtermHandler):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def forget_after_fork(self) -> None:
        """Release everything in a forked child, which has no thread, and must not use its parent's pipe."""
        self._release_sigterm()
        for each in self._living_listeners():
            if (listener := each()) is not None:
                listener.forget_after_fork()
        self._close_pipe()
        self._lock, self._round = threading.RLock(), threading.Condition()
        self._thread, self._listeners = None, ()
        self._sigterm_s = self._handled_s = self._exit_code = None

    def _on_sigterm(self) -> bool:
        """Note, inside a signal handler, that SIGTERM has come. Return False if no listener wants it."""
        self._sigterm_s = time.monotonic()
        if self._exit_code is not None:
            ExitTimer(self._exit_code, self._sigterm_s + _TIDY_S)
        # The wakeup byte wakes the thread too, unless other code has taken the wakeup descriptor, as asyncio's loop
        # does when it ends.
        self._wake_thread()
        return self.is_wanted_besides()

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
        if current == self._write_fd:
            current = self._wakeup_before
        self._wakeup_before = -1
        with contextlib.suppress(OSError, ValueError):  # its owner has closed it
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    def _wake_thread(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: there is no thread to wake
            os.write(self._write_fd, b"\0")

    def _close_pipe(self) -> None:
        ours, self._read_fd, self._write_fd = (self._read_fd, self._write_fd), -1, -1
        for fd in ours:
            if fd >= 0:
                os.close(fd)

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        while True:
            # Without listeners, only signals count.
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
        # A handler that the main thread uninstalls meanwhile must not take SIGTERM for good.
        with self._lock:
            handler = self._handler
            is_taken_back = handler is not None and handler.take_back()
        if handler is not None and is_taken_back:
            who = "both get it" if handler.tells_displaced else "only the training gets it"
            said = f"code in C, such as torch_xla, has taken SIGTERM: {who} from now on"
            if said not in self._said:
                self._said.add(said)
                tell_briefly(partial(_log.info, said))

    def _notify_listeners(self) -> None:
        """Call the listeners. This is a function of its own so that the thread holds no listener while it waits."""
        was_handled = self.is_permanent
        came_s = self._sigterm_s if not was_handled or self._handled_s is None else self._handled_s
        for each in self._listeners:
            if (listener := each()) is not None:
                listener.check_notices(came_s, was_handled=was_handled)

    def _read_wakeups(self) -> None:
        signals = os.read(self._read_fd, 4096).replace(b"\0", b"")
        if self._wakeup_before >= 0 and signals:
            with contextlib.suppress(OSError):  # full, or its owner has closed it
                os.write(self._wakeup_before, signals)
        if signal.SIGTERM in signals:
            self._sigterm_s = time.monotonic()


signal_watcher: Final = SignalWatcher()
_forking = threading.local()


def _before_fork() -> None:
    """Block SIGTERM while this thread forks.

    A forked data-loader worker that is terminated must die of it. If the signal came before the worker had released
    SIGTERM, the worker would survive, and its byte in the parent's pipe would look like a notice there.
    """
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _after_fork_in_child() -> None:
    signal_watcher.forget_after_fork()
    _after_fork()


atexit.register(signal_watcher.ignore_further_sigterms)
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
