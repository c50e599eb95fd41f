"""Wait in a manager's calls, and end all waits of a process that has a notice or has lost a rank.

A notice is a request to save and stop; its deadline is the time by which the process has to stop waiting.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakMethod

from stepkeeper.errors import ClosedError, NoticeDeadlineError, StepkeeperError
from stepkeeper.fork_guard import forget_in_forks

__all__ = ["SilenceLimit", "Waits", "call_weakly"]

P = ParamSpec("P")
T = TypeVar("T")
_FORKED: Final = "this manager belongs to the parent of this forked process; construct another one"
_LOOK_S: Final = 0.2
"""The interval at which a wait checks whether it has to end."""

_SETTLE_S: Final = 3.0
"""The time that saves in flight have after the loss of a rank. A save that all ranks have voted for is still committed,
and another one fails with its own error.
"""


def call_weakly(method: Callable[P, T]) -> Callable[P, T | None]:
    """Return a function that calls a bound method as long as its object lives, without keeping it alive."""
    held = WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        alive = held()
        return None if alive is None else alive(*args, **kwargs)

    return call


class SilenceLimit:
    """Limit how long a rank waits for others without any rank's progress. Progress is a count that has changed."""

    def __init__(self, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends_s = now_s + timeout_s
        self._count: int | None = None

    def is_over(self, now_s: float) -> bool:
        """Return whether the time is over."""
        return now_s > self._ends_s

    def has_moved(self, count: int, now_s: float) -> bool:
        """Record the count. If it differs from the last one, restart the time and return True."""
        before, self._count = self._count, count
        if before is None or count == before:
            return False
        self.restart(now_s)
        return True

    def restart(self, now_s: float) -> None:
        """Restart the time at `now_s`."""
        self._ends_s = now_s + self._timeout_s


class Waits:
    """Wait, and end waits early if needed. All parts of a manager wait through one instance. Any thread may call it."""

    def __init__(self) -> None:
        self.notice_left_s: Callable[[float], float | None] = lambda _since_s: None
        """Returns the seconds that a notice leaves to a wait or a save, by the time of its last progress
        (time.monotonic()); None without a notice.
        """

        self._lock = threading.Lock()
        self.loss: StepkeeperError | None = None
        """The error that ends all waits, if another rank is lost; else None."""

        self._death: StepkeeperError | None = None
        """The same if that rank ended without notice."""

        self._has_ended = threading.Event()
        self._progress_s = 0.0
        self._over_since_s: float | None = None
        """Time of the last progress before a notice's deadline ended a wait."""

        self._calls: dict[object, float] = {}
        """When each of the manager's calls that now run in some thread began."""

        forget_in_forks(self)

    def limit_by_notices(self, left_s: Callable[[float], float | None]) -> None:
        """Limit waits by the time that this method returns. Its object, a manager's part, is held weakly."""
        self.notice_left_s = call_weakly(left_s)

    @property
    def stuck_since_s(self) -> float | None:
        """Time (time.monotonic()) since which a thread is in a manager's call without progress, if any."""
        began_s = min(tuple(self._calls.values()), default=None)
        return None if began_s is None else max(began_s, self._progress_s)

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Register that this thread is in one of the manager's calls."""
        call = object()
        self._calls[call] = time.monotonic()
        try:
            yield
        finally:
            self._calls.pop(call, None)

    def end_all(self, error: StepkeeperError, *, is_death: bool = False) -> None:
        """Raise `error`, which names a lost rank, in all present and later waits. The first error stays.

        `is_death`: the rank ended without notice to the others.
        """
        with self._lock:
            if self.loss is None:
                self.loss, self._death = error, error if is_death else None
        self._has_ended.set()

    def forget_after_fork(self) -> None:
        """End all waits in a forked child, which doesn't have the threads that would resolve them."""
        self._lock, self._has_ended = threading.Lock(), threading.Event()
        self.loss, self._death = ClosedError(_FORKED), None

    def explain(self, error: BaseException, timeout_s: float) -> BaseException:
        """Return the loss of a rank that ended without notice, which explains `error`; without one, return `error`.

        The training's collectives may fail before the connections between the ranks show the loss, so this waits for
        it. An exit that the program chose is returned unchanged.
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
        """Record a save's progress: as long as it makes some, only a notice's fixed deadline ends it."""
        self._progress_s = time.monotonic()

    def raise_loss(self) -> None:
        """Raise the error that ends all waits, if there is one."""
        if (loss := self.loss) is not None:
            # A new one each time: several threads raise it, and each adds its own trace.
            raise type(loss)(str(loss))

    @property
    def has_to_hurry(self) -> bool:
        """True if a notice has come or a rank is lost: work that the next start can do is left to it."""
        return self.loss is not None or self.notice_left_s(time.monotonic()) is not None

    def check(self, since_s: float) -> None:
        """Check that a wait since `since_s` may continue. Raises NoticeDeadlineError, or a rank's loss."""
        self.raise_loss()
        progress_s = max(since_s, self._progress_s)
        if self._over_since_s is not None and self._progress_s <= self._over_since_s:
            # The deadline has ended another wait, and nothing has progressed since: it doesn't restart with each wait.
            progress_s = self._over_since_s
        left_s = self.notice_left_s(progress_s)
        if left_s is not None and left_s <= 0:
            self._over_since_s = progress_s
            raise NoticeDeadlineError(
                f"shutdown deadline reached after {time.monotonic() - since_s:.1f} s; uncommitted data is dropped, "
                "the next start resumes from the newest commit"
            )

    def await_all(self, futures: Collection[Future[Any]], timeout_s: float | None = None) -> bool:
        """Wait until all `futures` are done. Return False if some aren't after `timeout_s` (None: no limit).

        Raises NoticeDeadlineError, or the loss of a rank if the futures aren't done shortly after.
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
            except StepkeeperError:  # a rank is lost
                if wait_for(futures, _SETTLE_S).not_done:
                    raise
                return True

    @contextmanager
    def in_turn(self, turn: threading.Lock, doing: str, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the lock `turn` for the block; the wait for it ends like others. `doing` is its holder's work.

        Raises TimeoutError if another thread still holds it after `timeout_s`, and the errors of `check`.
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
        """Wait until the started threads have ended. Raises the errors of `check`."""
        since_s = time.monotonic()
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_S)
                if thread.is_alive():
                    self.check(since_s)

    def run(self, call: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run `call`, which may hang, in another thread. Raises TimeoutError, or what it or `check` raise."""
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
