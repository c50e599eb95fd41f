"""Take SIGTERM for the whole process, with one handler and one thread, and choose what it does.

- It is a notice to each manager that wants it. An earlier handler of the program is called too.
- Otherwise the program's own handler decides, in Python or C, even a later one.
- Without one, the newest of the other listeners acts before the signal ends the process.
- It doesn't end a process that is ending already: the exit code of that end counts.

Python runs signal handlers between two bytecodes of the main thread, so a long compilation or collective there delays
them. But the signal itself writes its number to the wakeup file descriptor (`signal.set_wakeup_fd`): this is a pipe,
which the thread reads at once.
"""

import atexit
import os
import select
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Final, Protocol
from weakref import ref

from stepkeeper.ending.exits import exit_at
from stepkeeper.ending.sigterm_handler import SigtermHandler
from stepkeeper.loggers import logger, run_briefly

__all__ = ["SignalListener", "SignalWatcher", "signal_watcher"]

_log: Final = logger(__name__)
_TICK_MILLIS: Final = 200
_TIDY_S: Final = 5.0
"""Seconds that SIGTERM leaves to a process that is already ending for another reason."""


class SignalListener(Protocol):
    """An object that the signal watcher calls from `add` until `remove`, or until it is dropped."""

    is_manager: bool
    """False for a listener that acts only if SIGTERM would end the process."""

    wants_sigterm: bool

    def on_tick(self) -> None:
        """Check for notices. The thread calls this five times a second, and after each signal."""


class SignalWatcher:
    """Take SIGTERM on behalf of all listeners; `signal_watcher` is the process's only instance.

    Listeners are held weakly, so a manager may be dropped without being closed. Signal handlers must take no lock, so
    the state that they read is never changed in place, only replaced.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._listeners: tuple[ref[SignalListener], ...] = ()
        self._handler: SigtermHandler | None = None
        self._came_s: float | None = None
        self._is_ending = False
        self._exit_code: int | None = None
        """The code with which this process is about to exit, with or without SIGTERM; None before."""

        self._pipe: tuple[int, int] | None = None
        """The ends to read and to write; None before the thread has started."""

    @property
    def handles_sigterm(self) -> bool:
        """True if the listeners that want SIGTERM get it."""
        return self._handler is not None

    @property
    def ends_process(self) -> bool:
        """True if SIGTERM would end this process: no manager wants it, and no handler of the program takes it."""
        if self._is_ending or self._is_notice:
            return False
        current = signal.getsignal(signal.SIGTERM)
        if isinstance(current, SigtermHandler):
            return current.before is signal.SIG_DFL and current.replacement is None
        return current is signal.SIG_DFL

    @property
    def _is_notice(self) -> bool:
        return any(each.is_manager for each in self._find_wanting())

    def add(self, listener: SignalListener) -> None:
        """Call `listener` from now on. Take SIGTERM if the listener wants it and this is the main thread."""
        with self._lock:
            if self._pipe is None:
                self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                threading.Thread(target=self._run, args=self._pipe[:1], name="notices", daemon=True).start()
            # If the process was ending, the program has caught the exception that should have ended it.
            self._is_ending, self._exit_code = False, None
            self._listeners = (ref(listener), *self._find_others(listener))
            if listener.wants_sigterm and threading.current_thread() is threading.main_thread():
                if self._handler is None or signal.getsignal(signal.SIGTERM) is not self._handler:
                    self._handler = SigtermHandler(self._on_sigterm)
                self._set_wakeup_fd(self._pipe[1])

    def remove(self, listener: SignalListener, *, is_ending: bool = False) -> None:
        """Stop calling `listener`. After the last one that wants SIGTERM, the earlier handling is restored.

        `is_ending`: it had a notice, so SIGTERM stays handled until the process ends.
        """
        with self._lock:
            self._listeners = self._find_others(listener)
            self._is_ending = self._is_ending or is_ending
            is_wanted = self._is_ending or self._find_wanting()
            if not is_wanted and threading.current_thread() is threading.main_thread():
                self._release_sigterm()

    def keep_exit_code(self, code: int) -> None:
        """Make SIGTERM from now on only hasten the end of this process, which is about to exit with `code`."""
        self._is_ending, self._exit_code = True, code

    def read_sigterm(self) -> float | None:
        """Return the time of the first SIGTERM that a listener wanted; None without one. Any thread may call this.

        It is a notice to later managers too: the process still has to end.
        """
        with self._lock:
            self._take_back_sigterm()
            with suppress(BlockingIOError):  # no signal has come
                # Each byte is a signal's number.
                if self._pipe is not None and signal.SIGTERM in os.read(self._pipe[0], 4096):
                    self._record_sigterm()
            return self._came_s

    def ignore_further_sigterms(self) -> None:
        """Ignore SIGTERM while the interpreter is finalized, in a process that is ending.

        Python removes its handlers then, and the signal would kill the process instead of its exit code standing.
        """
        if self._is_ending and isinstance(signal.getsignal(signal.SIGTERM), SigtermHandler):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def forget_after_fork(self) -> None:
        """Release everything in a forked child, which has no thread and must not use its parent's pipe."""
        self._lock, self._listeners, self._is_ending = threading.RLock(), (), False
        self._came_s = self._exit_code = None
        self._release_sigterm()
        for fd in self._pipe or ():
            os.close(fd)
        self._pipe = None

    def _on_sigterm(self) -> bool:
        """Record SIGTERM, inside a signal handler. Return False if the program's own handling decides."""
        # The thread may know nothing: asyncio's loop takes the wakeup descriptor, and clears it at its end.
        self._record_sigterm()
        if self._exit_code is not None:
            exit_at(time.monotonic() + _TIDY_S, self._exit_code)
        return self._is_ending or bool(self._find_wanting())

    def _record_sigterm(self) -> None:
        if self._came_s is None and (self._is_notice or self.ends_process):
            self._came_s = time.monotonic()

    def _find_others(self, listener: SignalListener) -> tuple[ref[SignalListener], ...]:
        return tuple(each for each in self._listeners if each() not in (None, listener))

    def _find_wanting(self) -> list[SignalListener]:
        found = [each() for each in self._listeners]
        return [each for each in found if each is not None and each.wants_sigterm]

    def _release_sigterm(self) -> None:
        """Uninstall the handler and release the wakeup descriptor, in the main thread, also of a forked child."""
        handler, self._handler = self._handler, None
        if handler is not None:
            handler.uninstall()
            self._set_wakeup_fd(-1)

    def _set_wakeup_fd(self, fd: int) -> None:
        """Set the descriptor, unless the program has one, such as that of an asyncio loop with signal handlers."""
        before = signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        if before not in (-1, *(self._pipe or ())):
            with suppress(OSError, ValueError):  # its owner has closed it
                signal.set_wakeup_fd(before)

    def _run(self, read_fd: int) -> None:
        poll = select.poll()
        poll.register(read_fd, select.POLLIN)
        while True:
            poll.poll(_TICK_MILLIS)
            self.read_sigterm()
            self._call_listeners()

    def _call_listeners(self) -> None:
        """Call the listeners. This is a separate function so that the thread holds no listener while it waits."""
        for each in self._listeners:
            if (listener := each()) is not None:
                listener.on_tick()

    def _take_back_sigterm(self) -> None:
        handler = self._handler
        if handler is not None and handler.take_back():
            who = "both get SIGTERM" if handler.replacement is not None else "only the training gets SIGTERM"
            text = "C code, such as torch_xla, had replaced the SIGTERM handler: %s from now on"
            run_briefly(partial(_log.info, text, who))


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


atexit.register(signal_watcher.ignore_further_sigterms)
os.register_at_fork(after_in_child=signal_watcher.forget_after_fork)
os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
