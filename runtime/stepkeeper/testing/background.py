"""What a companion does beside its requests, done in the thread of a test."""

from collections.abc import Callable, Iterator
from functools import partial

from stepkeeper.companion.background import BackgroundTask, BlockingCall

__all__ = ["done", "jobs"]


def done(work: BackgroundTask) -> None:
    """All of it is done."""
    for _ in jobs(work):
        pass


def jobs(work: BackgroundTask) -> Iterator[None]:
    """One more job of `work` is done each time that it is asked for."""
    ask: Callable[[], BlockingCall] = partial(next, work)
    while True:
        try:
            job = ask()
        except StopIteration:
            return
        try:
            result = job()
        except Exception as error:  # the work's to judge
            ask = partial(work.throw, error)
        else:
            ask = partial(work.send, result)
        yield
