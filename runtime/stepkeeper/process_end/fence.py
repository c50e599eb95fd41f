"""End a process that knows of a fence with exit code 77, also where it isn't left through a manager's block.

An exception that ends the process ends it so. In a pod of the operator, whose batch Job acts on exit codes, so does any
other end: a start that has lost its root must not look like one that is done.
"""

import atexit
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final

__all__ = ["forget_fence", "note_fence", "show_exception"]

_fenced: Final[set[object]] = set()
"""Who knows of a fence in this process, which hasn't ended for it yet."""


def note_fence(name: object, *, ends_process: bool) -> None:
    """Have this process end as fenced if the fence's own error ends it, or however it ends.

    Args:
        name: Stands for who knows of a fence, and keeps nothing alive.
        ends_process: True if the process ends as fenced even if the program catches the error.

    """
    if ends_process:
        _fenced.add(name)
    if not isinstance(sys.excepthook, _ShowAndEnd):
        sys.excepthook = _ShowAndEnd(sys.excepthook)


def forget_fence(name: object) -> None:
    """Let this process end as it may, as far as `name` is concerned."""
    _fenced.discard(name)


def show_exception(error: BaseException) -> None:
    """Show an exception as the interpreter would, and go on."""
    hook = sys.excepthook
    show = hook.show if isinstance(hook, _ShowAndEnd) else hook
    show(type(error), error, error.__traceback__)


class _ShowAndEnd:
    """Show an exception as before, then end the process as fenced if it tells of a fence, or if one is known."""

    def __init__(
        self, show: Callable[[type[BaseException], BaseException, TracebackType | None], Any]
    ) -> None:
        self.show = show

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        from stepkeeper.errors import FencedError

        self.show(kind, error, trace)
        # A prompt shows exceptions too, and goes on.
        if (_fenced or isinstance(error, FencedError)) and not (sys.flags.interactive or hasattr(sys, "ps1")):
            _fenced.clear()
            raise SystemExit(_exit_code())


def _end_pod() -> None:
    """End the process as fenced if it is a pod's, after all that was to be done at its end."""
    if not _fenced:
        return
    from stepkeeper.contract import Identity

    if not Identity.present(os.environ):
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(_exit_code())


def _exit_code() -> int:
    from stepkeeper.contract import ExitCode

    return int(ExitCode.FENCED)


atexit.register(_end_pod)
os.register_at_fork(after_in_child=_fenced.clear)
