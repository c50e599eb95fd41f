"""Choose the exit code of the pod: the one that the training meant, whatever its launcher made of it."""

import json
import os
from pathlib import Path
from typing import Final

from stepkeeper.contract import ContractError, ExitCode, Termination

__all__ = ["SIGTERM", "choose_exit_code", "read_last_word", "read_torchrun_error", "withdraw_last_word"]

SIGTERM: Final = "sigterm"
"""The notice of a process that SIGTERM told to stop."""

_STORE_LOST: Final = "DistNetworkError: "
_STOPPED: Final = "SignalException: "
_NEVER_CAME: Final = "timed out"
"""In the message of that error where no connection was made. A host that never came isn't lost."""


def choose_exit_code(code: int, last_word: Termination | None, *, was_told: bool) -> int:
    """Return the code to end with.

    A launcher that ends well has the say: it may have restarted its processes after one of them had failed. Where it
    fails, its code is its own (torchrun's is 1 whatever happened), and the training's last word says more. But where
    nobody told the launcher to stop, a process that SIGTERM stopped was stopped by the launcher, for the failure of
    another one which said nothing: the failure counts. Not so where all ranks had agreed on the step to stop at: none
    had failed before. And a launcher that was told to stop may fail after a training that was done.

    Args:
        code: The launcher's exit code.
        last_word: The termination message that the training has left, if any.
        was_told: True if the launcher was told to stop.

    """
    if code == ExitCode.DONE or last_word is None:
        return code
    if last_word.code == ExitCode.DONE:
        return ExitCode.DONE if was_told else code
    stopped_by_launcher = last_word.code == ExitCode.SAVED and last_word.notice == SIGTERM and not was_told
    return code if stopped_by_launcher and not last_word.agreed else last_word.code


def read_last_word(path: Path) -> Termination | None:
    """Read the termination message; None if there is none, or it is another program's."""
    try:
        return Termination.from_json(path.read_bytes())
    except (OSError, ContractError):
        return None


def withdraw_last_word(path: Path) -> None:
    """Empty the termination message, which would be believed before the exit code."""
    os.truncate(path, 0)


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
    return Termination(code=ExitCode.SAVED, notice=SIGTERM) if text.startswith(_STOPPED) else None
