"""Work beside the requests: what it asks of a store in a thread of its own, the rest where it is told to go on."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar, final

__all__ = ["BackgroundTask", "BlockingCall", "TaskQueue", "run_in_thread"]

T = TypeVar("T")

BlockingCall = Callable[[], object]
"""What may be done in any thread: it touches neither the log nor what the requests change."""

BackgroundTask = Generator[BlockingCall, Any, None]
"""Yields its jobs, and is sent, or thrown, what each has come to."""


def run_in_thread(job: Callable[[], T]) -> Generator[BlockingCall, Any, T]:
    """To be yielded from: what `job` returns, or raises."""
    result: T = yield job
    return result


@final
class TaskQueue:
    """Works, one after the other. All methods are called in one thread, which never waits here for a job."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        """`on_ready` is called, in another thread, when a job has ended."""
        self._on_ready = on_ready
        self._works: Final[deque[BackgroundTask]] = deque()
        self._job: Future[object] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stepkeeper-aside")

    @property
    def n_tasks(self) -> int:
        """Those that haven't ended."""
        return len(self._works)

    @property
    def can_advance(self) -> bool:
        """True where `go_on` has something to do."""
        return bool(self._works) and (self._job is None or self._job.done())

    def add_task(self, work: BackgroundTask) -> None:
        """It will be done after the others."""
        self._works.append(work)

    def advance(self) -> None:
        """The first work has done what comes before its next job, and that job has begun; or the work has ended."""
        try:
            job = self._asked(self._works[0])
        except StopIteration:
            self._works.popleft()
            return
        self._job = self._pool.submit(job)
        self._job.add_done_callback(lambda _: self._on_ready())

    def _asked(self, work: BackgroundTask) -> BlockingCall:
        done, self._job = self._job, None
        if done is None:
            return next(work)
        error = done.exception()
        return work.send(done.result()) if error is None else work.throw(error)
