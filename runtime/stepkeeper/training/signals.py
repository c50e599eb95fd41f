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
from collections.abc import Callable
from types import FrameType
from typing import Final, Protocol
from weakref import ref

from stepkeeper.loggers import logger

__all__ = ["Listener", "Watch", "watch"]

_log: Final = logger(__name__)
_TICK_MILLIS: Final = 200
_SETTLE_S: Final = 1.0

_Handler = Callable[[int, FrameType | None], object] | int | None


class Listener(Protocol):
    """Whom the watch works for, from `join` to `part`, or until nobody else has it any more."""

    hears_signals: bool
    """SIGTERM is its notice, and doesn't end the process meanwhile."""

    def look(self, terminated_s: float | None, *, heeded: bool) -> None:
        """Called five times a second, in the watch's thread. SIGTERM came at `terminated_s`, if it did.

        `heeded`: another listener has ended with it as its notice. If not, this is when it came last.
        """
        ...

    def disown(self) -> None:
        """It is the parent's: this is a forked child."""
        ...


class _Grip:
    """A handler for SIGTERM, and the one that was there before."""

    def __init__(self, watch: "Watch") -> None:
        self._watch = watch
        self.stays = False
        """It is never let go: a process that was told to stop is not to die of being told again while it ends."""

        self.before: Final[_Handler] = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._watch.told() or self.stays:
            if callable(self.before):
                try:
                    self.before(number, frame)
                except SystemExit as error:
                    # The end is ours to choose: at a step that all ranks save. The thread logs it, a handler must not.
                    self._watch.left = error
        elif callable(self.before):
            self.before(number, frame)
        elif self.before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def let_go(self) -> None:
        # Somebody who installed a handler after us keeps it; by way of that, this one is as if it weren't there.
        before = self.before or signal.SIG_DFL
        if signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, before)


class Watch:
    """One for the process: `watch`. What handlers read of it is replaced as a whole: they may take no lock."""

    def __init__(self) -> None:
        self.left: SystemExit | None = None
        """What the handler that was there before raised."""

        self._terminated_s: float | None = None
        """When its byte was read, or its handler ran: long afterwards, if the main thread was in a long compilation."""

        self._heeded_s: float | None = None
        self._listeners: tuple[ref[Listener], ...] = ()
        self._lock = threading.RLock()
        self._round = threading.Condition()
        self._n_rounds = 0
        self._thread: threading.Thread | None = None
        self._read_fd = self._write_fd = -1
        self._grip: _Grip | None = None
        self._wakeup_before = -1

    @property
    def has_signals(self) -> bool:
        """SIGTERM is taken: it is a notice of those who hear signals."""
        return self._grip is not None

    @property
    def stays(self) -> bool:
        """SIGTERM has been heeded, and will be for as long as this process lives."""
        grip = self._grip
        return grip is not None and grip.stays

    def join(self, listener: Listener) -> None:
        """`listener` is looked after. SIGTERM is taken if it hears signals, and this is the main thread."""
        with self._lock:
            others = (each for each in self._living() if each() is not listener)
            self._listeners = (*others, ref(listener))
            if self._thread is None:
                self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
                self._thread.start()
            if listener.hears_signals and threading.current_thread() is threading.main_thread():
                self._take_signals()
        # The thread may wait for nothing but signals.
        self._poke()

    def part(self, listener: Listener, *, keeps_signals: bool, heeded_s: float | None) -> None:
        """`listener` is looked after no more. Behind the last one the thread ends, and signals go where they went.

        Unless one `keeps_signals`. Those to come are told that SIGTERM came at `heeded_s`, if it had.
        """
        with self._lock:
            self._listeners = tuple(each for each in self._living() if each() is not listener)
            if self._grip is not None and keeps_signals:
                # In this order: the thread reads them in the other one.
                self._heeded_s = heeded_s if self._heeded_s is None else self._heeded_s
                self._grip.stays = True
            is_last = not self._listeners
            if is_last and not self.stays and threading.current_thread() is threading.main_thread():
                self._let_go()
            ending = self._thread if is_last and self._grip is None else None
        self._poke()
        if ending is not None and ending is not threading.current_thread():
            # Not for ever: another thread may have found it a new listener.
            ending.join(_SETTLE_S)

    def told(self) -> bool:
        """In a handler: SIGTERM has come. False if it is nobody's notice."""
        self._terminated_s = time.monotonic()
        found = [each() for each in self._listeners]
        # The wakeup byte has told the thread, unless somebody took the wakeup descriptor away, as asyncio's loop does
        # when it ends.
        self._poke()
        return any(each is not None and each.hears_signals for each in found)

    def settle(self) -> None:
        """A signal that came before this call was heard."""
        # The round that ends first may have looked before the signal came; the next one has not.
        self._await_round()
        self._await_round()

    def after_fork_in_child(self) -> None:
        """The child has none of it: no thread, no hold on signals, and no end of the pipe that it shares."""
        self._let_go()
        for each in self._living():
            if (listener := each()) is not None:
                listener.disown()
        for fd in (self._read_fd, self._write_fd):
            if fd >= 0:
                os.close(fd)
        self._lock, self._round = threading.RLock(), threading.Condition()
        self._read_fd = self._write_fd = -1
        self._thread, self._listeners = None, ()
        self._terminated_s = self._heeded_s = None

    def _await_round(self) -> None:
        if self._thread is None or self._thread is threading.current_thread():
            return
        with self._round:
            wanted = self._n_rounds + 1
            self._poke()
            self._round.wait_for(lambda: self._n_rounds >= wanted, _SETTLE_S)

    def _living(self) -> tuple[ref[Listener], ...]:
        return tuple(each for each in self._listeners if each() is not None)

    def _take_signals(self) -> None:
        if self._grip is None or signal.getsignal(signal.SIGTERM) is not self._grip:
            self._grip = _Grip(self)
        before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if before != self._write_fd:
            self._wakeup_before = before

    def _let_go(self) -> None:
        """Called by the main thread, also of a forked child."""
        grip, self._grip = self._grip, None
        if grip is None:
            return
        grip.let_go()
        current = signal.set_wakeup_fd(-1)
        if current == self._write_fd:
            current = self._wakeup_before
        self._wakeup_before = -1
        with contextlib.suppress(OSError, ValueError):  # whoever had it has closed it
            signal.set_wakeup_fd(current, warn_on_full_buffer=False)

    def _poke(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake already; closed: there is no thread to wake
            os.write(self._write_fd, b"\0")

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        while True:
            if poll.poll(_TICK_MILLIS if self._listeners else None):
                self._read_wakeups()
            self._look()
            with self._round:
                self._n_rounds += 1
                self._round.notify_all()
            with self._lock:
                self._listeners = self._living()
                if not self._listeners and self._grip is None:
                    ours = self._read_fd, self._write_fd
                    self._read_fd = self._write_fd = -1
                    self._thread = None
                    os.close(ours[0])
                    os.close(ours[1])
                    return

    def _look(self) -> None:
        """A function of its own: while the thread waits, it holds no listener."""
        left, self.left = self.left, None
        if left is not None:
            _log.warning(
                "the SIGTERM handler that was there before wants exit code %s: stop follows", left.code
            )
        heeded = self.stays
        came_s = self._terminated_s if not heeded or self._heeded_s is None else self._heeded_s
        for each in self._listeners:
            if (listener := each()) is not None:
                listener.look(came_s, heeded=heeded)

    def _read_wakeups(self) -> None:
        signals = os.read(self._read_fd, 4096).replace(b"\0", b"")
        if self._wakeup_before >= 0 and signals:
            with contextlib.suppress(OSError):  # full, or closed by whoever had it
                os.write(self._wakeup_before, signals)
        if signal.SIGTERM in signals:
            self._terminated_s = time.monotonic()


watch: Final = Watch()
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
    watch.after_fork_in_child()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
