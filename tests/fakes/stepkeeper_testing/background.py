"""Run a companion's background tasks in the thread of a test."""

from collections.abc import Callable, Iterator
from functools import partial

from stepkeeper.companion.background import BackgroundTask, BlockingCall

__all__ = ["done", "jobs"]


def done(task: BackgroundTask) -> None:
    """Run all of `task`."""
    for _ in jobs(task):
        pass


def jobs(task: BackgroundTask) -> Iterator[None]:
    """Run `task` one blocking call at a time.

    Yields:
        None after each blocking call, whose result or error the task gets when it is resumed.

    """
    resume: Callable[[], BlockingCall] = partial(next, task)
    while True:
        try:
            call = resume()
        except StopIteration:
            return
        try:
            result = call()
        except Exception as error:  # the task's to judge
            resume = partial(task.throw, error)
        else:
            resume = partial(task.send, result)
        yield
