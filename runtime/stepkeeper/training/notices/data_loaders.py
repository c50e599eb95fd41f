"""Bear the end of a DataLoader's workers, whom a signal to the whole session or group ends with the notice.

torch raises an error in the thread that trains when such a worker dies: from its SIGCHLD handler wherever that thread
is, or from the next batch.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import FrameType
from typing import Final

from stepkeeper.loggers import logger
from stepkeeper.training.notices.sigterm_handler import is_raised_by_handler

__all__ = ["bearing_ends_of_children", "interrupts_a_step", "is_end_of_workers"]

_log: Final = logger(__name__)
_LOADER: Final = "torch.utils.data.dataloader"
_HANDLING: Final = "torch.utils.data._utils.signal_handling"
_ASKS_WORKERS: Final = "_try_get_data"
"""The loader's method that hears from its workers: what fails in there is their end, a connection reset among it."""


def is_end_of_workers(error: BaseException | None) -> bool:
    """Tell whether `error`, or what it was raised for, says that a DataLoader's worker has died."""
    while error is not None:
        for frame, _ in walk_tb(error.__traceback__):
            module = frame.f_globals.get("__name__")
            if module == _HANDLING or (module == _LOADER and frame.f_code.co_name == _ASKS_WORKERS):
                return True
        error = error.__cause__ or error.__context__
    return False


def interrupts_a_step(error: BaseException) -> bool:
    """Tell whether a signal handler has raised `error` anywhere in a step: the state is that of no step then.

    A rank that waits for a batch isn't in the middle of an update.
    """
    return is_raised_by_handler(error) and not any(
        frame.f_globals.get("__name__") == _LOADER for frame, _ in walk_tb(error.__traceback__)
    )


@contextmanager
def bearing_ends_of_children() -> Iterator[None]:
    """Log what a SIGCHLD handler of the program raises within: a save isn't given up for it.

    torch looks at its workers again at the next batch.
    """
    before = signal.getsignal(signal.SIGCHLD)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        try:
            before(signum, frame)
        except Exception as error:
            borne.append(error)

    borne: list[Exception] = []
    signal.signal(signal.SIGCHLD, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGCHLD) is handle:
            signal.signal(signal.SIGCHLD, before)
        for error in borne:
            _log.warning("while the training stopped: %s", error)
