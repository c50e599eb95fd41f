"""Tolerate the exits of a DataLoader's workers: a signal to the whole session or process group ends them too.

torch then raises an error in the train thread: in its SIGCHLD handler, which can run between any two instructions, or
when the loop receives the next batch.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import FrameType
from typing import Any, Final

from stepkeeper.loggers import logger

__all__ = ["interrupts_a_step", "is_end_of_workers", "tolerate_worker_exits"]

_log: Final = logger(__name__)
_LOADER: Final = "torch.utils.data.dataloader"
_HANDLING: Final = "torch.utils.data._utils.signal_handling"
_ASKS_WORKERS: Final = "_try_get_data"
"""The loader's method that receives from its workers. Errors in it, such as a connection reset, mean their end."""


def is_end_of_workers(error: BaseException | None) -> bool:
    """Return True if `error`, or one of its causes, comes from a DataLoader worker that died."""
    while error is not None:
        for frame, _ in walk_tb(error.__traceback__):
            module = frame.f_globals.get("__name__")
            if module == _HANDLING or (module == _LOADER and frame.f_code.co_name == _ASKS_WORKERS):
                return True
        error = error.__cause__ or error.__context__
    return False


def interrupts_a_step(error: BaseException) -> bool:
    """Return True if a signal handler raised `error` in the middle of a step: the state then belongs to no step.

    A rank that waits for a batch isn't in the middle of an update.
    """
    handlers: list[Any] = [signal.getsignal(number) for number in signal.valid_signals()]
    # A function has its own code, a bound method its function's, and another callable that of its class's `__call__`.
    codes = {
        getattr(each, "__code__", getattr(type(each).__call__, "__code__", None))
        for each in filter(callable, handlers)
    }
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    is_between_steps = any(frame.f_globals.get("__name__") == _LOADER for frame in frames)
    return not is_between_steps and any(frame.f_code in codes for frame in frames)


@contextmanager
def tolerate_worker_exits() -> Iterator[None]:
    """Log errors of the program's SIGCHLD handler, which must end no save. torch checks workers again."""
    before = signal.getsignal(signal.SIGCHLD)
    # Handlers run in the main thread, and only it may set them.
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    tolerated: list[Exception] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        try:
            before(signum, frame)
        except Exception as error:
            tolerated.append(error)

    signal.signal(signal.SIGCHLD, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before)
        for error in tolerated:
            _log.warning("while the training stopped: %s", error)
