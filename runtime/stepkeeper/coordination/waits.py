"""End the waits of a process that is told to stop or has lost a rank, whatever they wait for."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from typing import Any, Final, TypeVar
from weakref import WeakMethod

from stepkeeper.errors import ClosedError, NoticeDeadlineError, StepkeeperError
from stepkeeper.fork_guard import forget_in_forks

__all__ = ["SilenceLimit", "Waits"]

T = TypeVar("T")
_FORKED: Final = "this manager is that of the process which has forked this one; construct another one"
_LOOK_S: Final = 0.2
"""The interval at which a wait checks whether it has to end."""

_SETTLE_S: Final = 3.0
"""The time that saves in flight have after the loss of a rank: one that all ranks have voted for is committed yet, and
one that can't be says itself why.
"""


class SilenceLimit:
    """Limit how long a rank waits for others while no save makes progress on any of them."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        """Start to count `timeout_s` seconds at `now_s`."""
        self._timeout_s = timeout_s
        self._ends_s = now_s + timeout_s
        self._moved: int | None = None

    def is_over(self, now_s: float) -> bool:
        """Tell whether the time is over."""
        return now_s > self._ends_s

    def has_moved(self, moved: int, now_s: float) -> bool:
        """Take over how much saves have moved by `now_s`. If it is more than the last time, the time starts anew.

        Returns:
            True if it is more.

        """
        before, self._moved = self._moved, moved
        if before is None or moved == before:
            return False
        self.restart(now_s)
        return True

    def restart(self, now_s: float) -> None:
        """Let the time start anew at `now_s`."""
        self._ends_s = now_s + self._timeout_s


class Waits:
    """Know whether waits have to end. All parts of a manager wait through one of these. Any thread may call it."""

    def __init__(self) -> None:
        self.notice_left_s: Callable[[float], float | None] = lambda _since_s: None
        """Returns how many seconds a notice leaves to a wait, or to a save, that has made its last progress at that
        time by time.monotonic(); None without a notice.
        """

        self._lock = threading.Lock()
        self._loss: StepkeeperError | None = None
        self._death: StepkeeperError | None = None
        self._has_ended = threading.Event()
        self._progress_s = 0.0
        self._over_since_s: float | None = None
        """Time of the last progress before the time of a notice was over for a wait."""

        self._calls: dict[object, float] = {}
        forget_in_forks(self)

    def heed_notices(self, left_s: Callable[[float], float | None]) -> None:
        """Ask this method how long a notice leaves.

        It is held weakly: a save that the training keeps must not keep the manager's parts alive.
        """
        held = WeakMethod(left_s)

        def ask(progress_s: float) -> float | None:
            found = held()
            return None if found is None else found(progress_s)

        self.notice_left_s = ask

    @property
    def stuck_since_s(self) -> float | None:
        """Time by time.monotonic() since which a thread has been in one of the manager's calls without any progress.

        None if no thread is in one.
        """
        began_s = min(tuple(self._calls.values()), default=None)
        return None if began_s is None else max(began_s, self._progress_s)

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Note that this thread is in one of the manager's calls."""
        call = object()
        self._calls[call] = time.monotonic()
        try:
            yield
        finally:
            self._calls.pop(call, None)

    @property
    def loss(self) -> StepkeeperError | None:
        """The error for which all waits end, if there is one: another rank is lost."""
        return self._loss

    def end_all(self, error: StepkeeperError, *, is_death: bool = False) -> None:
        """Raise `error` in all waits, present and later ones. The first error stays.

        Args:
            error: Tells which rank is lost.
            is_death: True if it has ended without a word to the others.

        """
        with self._lock:
            if self._loss is None:
                self._loss, self._death = error, error if is_death else None
        self._has_ended.set()

    def forget_after_fork(self) -> None:
        """End all waits, in a forked child: what they wait for is done by threads that it doesn't have."""
        self._lock, self._has_ended = threading.Lock(), threading.Event()
        self._loss, self._death = ClosedError(_FORKED), None

    def explain(self, error: BaseException, timeout_s: float) -> BaseException:
        """Return the loss of a rank that has ended without a word, as what `error` has come of; else `error`.

        The training's collectives may fail before the connections between the ranks tell of that end, for which there
        are `timeout_s` seconds. What chose to end the process has no other reason.
        """
        if not isinstance(error, Exception):
            return error
        self._has_ended.wait(timeout_s)
        if (death := self._death) is None:
            return error
        lost = type(death)(str(death))
        lost.__cause__ = error
        return lost

    def note_progress(self) -> None:
        """Note that a save makes progress: as long as it does, nothing but a notice's fixed deadline cuts it off."""
        self._progress_s = time.monotonic()

    def raise_loss(self) -> None:
        """Raise the error for which all waits end, if there is one."""
        if (loss := self._loss) is not None:
            # A new one each time: several threads raise it, and each adds its own trace.
            raise type(loss)(str(loss))

    @property
    def has_to_hurry(self) -> bool:
        """True if a notice has come, or a rank is lost: what the next start can do as well is left to it."""
        return self._loss is not None or self.notice_left_s(time.monotonic()) is not None

    def check(self, since_s: float) -> None:
        """Check that a wait may go on.

        Args:
            since_s: Time at which the wait began, by time.monotonic().

        Raises:
            NoticeDeadlineError: A notice came, and its time is over.
            StepkeeperError: Another rank is lost.

        """
        self.raise_loss()
        progress_s = max(since_s, self._progress_s)
        if self._over_since_s is not None and self._progress_s <= self._over_since_s:
            # The time was over before, for another wait: it doesn't start anew with each.
            progress_s = self._over_since_s
        left_s = self.notice_left_s(progress_s)
        if left_s is not None and left_s <= 0:
            self._over_since_s = progress_s
            raise NoticeDeadlineError(
                f"the time that a notice leaves was over after a wait of {time.monotonic() - since_s:.1f} s: what is "
                "committed stays as it is, what isn't won't be; the next start resumes the newest commit"
            )

    def await_all(self, futures: Collection[Future[Any]], timeout_s: float | None = None) -> bool:
        """Wait until all `futures` are done.

        Args:
            futures: What to wait for.
            timeout_s: Longest time to wait, in seconds; None waits until something ends the wait.

        Returns:
            False if some aren't done after `timeout_s`.

        Raises:
            NoticeDeadlineError: A notice came, and its time is over.
            StepkeeperError: Another rank is lost, and the futures weren't done soon after.

        """
        since_s = time.monotonic()
        ends_s = None if timeout_s is None else since_s + timeout_s
        while True:
            left_s = _LOOK_S if ends_s is None else min(_LOOK_S, max(0.0, ends_s - time.monotonic()))
            if not wait_for(futures, left_s).not_done:
                return True
            if ends_s is not None and time.monotonic() >= ends_s:
                return False
            try:
                self.check(since_s)
            except NoticeDeadlineError:
                raise
            except StepkeeperError:
                if wait_for(futures, _SETTLE_S).not_done:
                    raise
                return True

    @contextmanager
    def in_turn(self, turn: threading.Lock, doing: str, timeout_s: float | None = None) -> Iterator[None]:
        """Hold `turn` for the block. A plain wait for the lock would hold up the train thread, whatever it is told.

        Args:
            turn: What one thread at a time holds.
            doing: What a thread does in its turn, for people.
            timeout_s: Longest time to wait, in seconds; None waits until something ends the wait.

        Raises:
            TimeoutError: Another thread still has the turn after `timeout_s`.
            NoticeDeadlineError: A notice came, and its time is over.
            StepkeeperError: Another rank is lost.

        """
        since_s = time.monotonic()
        left_s = _LOOK_S if timeout_s is None else timeout_s
        while not turn.acquire(timeout=max(0.0, min(_LOOK_S, left_s))):
            waited_s = time.monotonic() - since_s
            if timeout_s is not None and (left_s := timeout_s - waited_s) <= 0:
                raise TimeoutError(f"another thread was still {doing} after {waited_s:.1f} s")
            self.check(since_s)
        try:
            yield
        finally:
            turn.release()

    def await_threads(self, threads: Iterable[threading.Thread]) -> None:
        """Wait until the threads have ended, those that were started. Raises what `check` raises."""
        since_s = time.monotonic()
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_S)
                if thread.is_alive():
                    self.check(since_s)

    def run(self, call: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run `call` in another thread, since it may take long or be stuck, and wait for it.

        Args:
            call: What to run. This thread does nothing meanwhile.
            timeout_s: Longest time to wait, in seconds; None waits until something ends the wait.

        Raises:
            TimeoutError: `call` hasn't ended after `timeout_s`.
            NoticeDeadlineError: A notice came, and its time is over.
            StepkeeperError: Another rank is lost; or what `call` raises.

        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # the waiting thread raises it
                future.set_exception(error)

        threading.Thread(target=run, name="waited-for", daemon=True).start()
        if not self.await_all([future], timeout_s):
            raise TimeoutError(f"no answer for {timeout_s:.1f} s")
        return future.result(0)
