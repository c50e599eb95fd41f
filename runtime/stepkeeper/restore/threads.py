"""Read in a few threads, and wait for them only as long as waits may go on: a store may be stuck."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeVar

from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import NoticeDeadlineError, PeerLostError

__all__ = ["ReadingThreads"]

T = TypeVar("T")


class ReadingThreads:
    """A few threads that make calls in the order in which they were submitted, until the block is left.

    What hasn't begun by then isn't begun. A thread that is stuck in a call when a notice's time is over, or a rank is
    lost, is left behind: it is a daemon, and keeps no process alive.
    """

    def __init__(self, n_threads: int, waits: Waits, *, name: str) -> None:
        """Start the threads. `waits` ends the waits for them."""
        self._waits = waits
        self._closed = False
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., T], *arguments: object) -> Future[T]:
        """Make the call in one of the threads."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call(*arguments))
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)

        self._calls.put(run)
        return future

    def await_result(self, future: Future[T]) -> T:
        """Return the result of a call. Raises what that raises, or what ends all waits."""
        self._waits.await_all([future])
        return future.result(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for _ in self._threads:
            self._calls.put(None)
        if not isinstance(error, NoticeDeadlineError | PeerLostError):
            self._waits.await_threads(self._threads)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._closed:
                call()
            del call  # it refers to what was read
