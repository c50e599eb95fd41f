"""Run a companion's background tasks in the thread of a test."""

from collections.abc import Callable
from functools import partial

from stepkeeper.companion.background import BackgroundTask, BlockingCall


def done(task: BackgroundTask) -> None:
    """Run all of `task`, which gets the result or the error of each of its blocking calls."""
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
