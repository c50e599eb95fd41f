"""Choose the exit code of the pod: the one that the training meant, whatever its launcher made of it."""

import json
from pathlib import Path
from typing import Final

from stepkeeper.contract import ExitCode, NoticeSource, Termination

__all__ = ["choose_exit_code", "read_torchrun_error"]

_STORE_LOST: Final = "DistNetworkError: "
_STOPPED: Final = "SignalException: "
_NEVER_CAME: Final = "timed out"
"""In the message of that error where no connection was made. A host that never came isn't lost."""


def choose_exit_code(code: int, message: Termination | None, *, was_told: bool) -> int:
    """Return the code to end with.

    A launcher that ends well has the say: it may have restarted its processes after one of them had failed. Where it
    fails, its code is its own (torchrun's is 1 whatever happened), and the training's message says more. But where
    nobody told the launcher to stop, a process that SIGTERM stopped was stopped by the launcher, for the failure of
    another one which said nothing: the failure counts. Not so where all ranks had agreed on the step to stop at: none
    had failed before. And a launcher that was told to stop may fail after a training that was done.

    Args:
        code: The launcher's exit code.
        message: The termination message that the training has left, if any.
        was_told: True if the launcher was told to stop.

    """
    if code == ExitCode.DONE or message is None:
        return code
    if message.code == ExitCode.DONE:
        return ExitCode.DONE if was_told else code
    stopped_by_launcher = (
        message.code == ExitCode.SAVED and message.notice == NoticeSource.SIGTERM and not was_told
    )
    return code if stopped_by_launcher and message.agreed_step is None else message.code


def read_torchrun_error(path: Path) -> Termination | None:
    """Read why torchrun failed before its processes trained, if it was for the loss of another host or a notice.

    The torchrun in rank 0's pod has the store by which they all find each other.

    Args:
        path: The file into which torchrun writes the exception that ended it.

    """
    try:
        said = json.loads(path.read_bytes())["message"]
    except (OSError, ValueError, KeyError, TypeError):
        # None was written: it hasn't failed by an exception, or it is no torchrun.
        return None
    text = said.get("message") if isinstance(said, dict) else said
    if not isinstance(text, str):
        return None
    if text.startswith(_STORE_LOST) and _NEVER_CAME not in text:
        return Termination(code=ExitCode.PEER_LOST, error=text)
    stopped = Termination(code=ExitCode.SAVED, notice=NoticeSource.SIGTERM)
    return stopped if text.startswith(_STOPPED) else None
