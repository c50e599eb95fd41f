"""End a process that has lost its root (is fenced) with exit code 77, also without a manager's `with` block.

Two hooks do so. The exception hook acts if an exception ends the process. In a pod of the operator, whose batch Job
acts on exit codes, an exit function acts at any other end: a start that has lost its root must not look done.

This module imports only the standard library at first: other imports wait until a process is fenced.
"""

import atexit
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Final
from weakref import WeakMethod

__all__ = ["end_as_fenced_if"]

_checks: Final[list[Callable[[], Callable[[], bool] | None]]] = []
"""Functions that each return a manager's `is_lost`, or None if that manager is gone."""


def end_as_fenced_if(is_lost: Callable[[], bool], *, is_pods: bool) -> None:
    """End this process as fenced if the method `is_lost` returns True at the process's end.

    `is_pods`: the operator gave this root to the pod. Any other root counts only as long as the method's object lives.
    """
    if not _checks:
        sys.excepthook = partial(_show_and_end, sys.excepthook)
    _checks.append((lambda: is_lost) if is_pods else WeakMethod(is_lost))


def _show_and_end(
    show: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show an exception as before, then end the process as fenced if a root is lost."""
    from stepkeeper.contract import ExitCode
    from stepkeeper.errors import FencedError

    show(kind, error, trace)
    # A prompt shows exceptions too, and continues.
    is_prompt = sys.flags.interactive or hasattr(sys, "ps1")
    if not is_prompt and (isinstance(error, FencedError) or _is_fenced()):
        raise SystemExit(int(ExitCode.FENCED))


def _end_pod() -> None:
    """End a pod's process as fenced. This is the first registered exit function, so it runs last."""
    if not _is_fenced():
        return
    from stepkeeper.contract import ExitCode, Identity

    if Identity.present(os.environ):
        logging.shutdown()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(ExitCode.FENCED)


def _is_fenced() -> bool:
    return any(is_lost() for find in tuple(_checks) if (is_lost := find()) is not None)


atexit.register(_end_pod)
os.register_at_fork(after_in_child=_checks.clear)
