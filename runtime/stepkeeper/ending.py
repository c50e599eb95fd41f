"""How a process ends: its exit code, and its last word in the termination-message file."""

import logging
import traceback
from pathlib import Path
from typing import Final

from stepkeeper.contract import ExitCode, Termination
from stepkeeper.errors import FencedError, GangError

__all__ = ["exit_code_of", "traceback_of", "write_termination"]

_log: Final = logging.getLogger(__name__)
_FAILURE: Final = 1
_INTERRUPTED: Final = 130


def exit_code_of(error: BaseException) -> int:
    """The code that a process ends with when `error` ends it."""
    match error:
        case SystemExit(code=None):
            return ExitCode.DONE
        case SystemExit(code=int(code)):
            return code
        case FencedError():
            return ExitCode.FENCED
        case GangError():
            return ExitCode.PEER_LOST
        case KeyboardInterrupt():
            return _INTERRUPTED
        case _:
            return _FAILURE


def traceback_of(error: BaseException) -> str | None:
    """What a person wants to read; None where the process chose to end."""
    if isinstance(error, SystemExit):
        return None if isinstance(error.code, int | None) else str(error.code)
    return "".join(traceback.format_exception(error))


def write_termination(path: Path | None, termination: Termination) -> None:
    """`termination` is in the file that the kubelet reads, where there is one.

    A file that can't be written is logged, no more: the process ends either way, and its exit code says most of it.
    """
    if path is None:
        return
    try:
        path.write_bytes(termination.to_json())
    except OSError as error:
        _log.warning("the termination message can't be written to %s: %s", path, error)
