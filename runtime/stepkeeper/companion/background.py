"""Run background tasks one after another, with their blocking calls in a separate thread."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar, final

__all__ = ["BackgroundTask", "BlockingCall", "TaskQueue", "run_in_thread"]

T = TypeVar("T")

BlockingCall = Callable[[], object]
"""A call that any thread may make: it touches neither the log nor anything that requests change."""

BackgroundTask = Generator[BlockingCall, Any, None]
"""A generator that yields its blocking calls, and receives the result or the error of each."""


def run_in_thread(call: Callable[[], T]) -> Generator[BlockingCall, Any, T]:
    """Have the task queue run `call` in its thread, and return the result; for use with `yield from`."""
    result: T = yield call
    return result


@final
class TaskQueue:
    """Run background tasks in the order of their addition. One thread calls all methods; none waits."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        """Start with no tasks. A thread calls `on_ready` when a blocking call has ended."""
        self._on_ready = on_ready
        self._tasks: Final[deque[BackgroundTask]] = deque()
        self._call: Future[object] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="stepkeeper-background")

    @property
    def n_tasks(self) -> int:
        """Number of tasks that haven't ended."""
        return len(self._tasks)

    @property
    def can_advance(self) -> bool:
        """True if there is a task that isn't waiting for its blocking call."""
        return bool(self._tasks) and (self._call is None or self._call.done())

    def add_task(self, task: BackgroundTask) -> None:
        """Append `task`: it starts when the tasks before it have ended."""
        self._tasks.append(task)

    def advance(self) -> None:
        """Run the first task up to its next blocking call, and start that call; or remove the task if it has ended."""
        try:
            call = self._resume(self._tasks[0])
        except StopIteration:
            self._tasks.popleft()
            return
        self._call = self._pool.submit(call)
        self._call.add_done_callback(lambda _: self._on_ready())

    def _resume(self, task: BackgroundTask) -> BlockingCall:
        done, self._call = self._call, None
        if done is None:
            return next(task)
        error = done.exception()
        return task.send(done.result()) if error is None else task.throw(error)
