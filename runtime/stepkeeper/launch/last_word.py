"""Choose the exit code of the pod: the one that the training meant, whatever its launcher made of it."""

import os
from pathlib import Path
from typing import Final

from stepkeeper.contract import ContractError, ExitCode, Termination

__all__ = ["SIGTERM", "choose_exit_code", "read_last_word", "withdraw_last_word"]

SIGTERM: Final = "sigterm"
"""The notice of a process that SIGTERM told to stop."""


def choose_exit_code(code: int, last_word: Termination | None, *, was_told: bool) -> int:
    """Return the code to end with.

    A launcher that ends well has the say: it may have restarted its processes after one of them had failed. Where it
    fails, its code is its own (torchrun's is 1 whatever happened), and the training's last word says more. But where
    nobody told the launcher to stop, a process that SIGTERM stopped was stopped by the launcher, for the failure of
    another one which said nothing: the failure counts. Not so where all ranks had agreed on the step to stop at: none
    had failed before.

    Args:
        code: The launcher's exit code.
        last_word: The termination message that the training has left, if any.
        was_told: True if the launcher was told to stop.

    """
    if code == ExitCode.DONE or last_word is None or last_word.code == ExitCode.DONE:
        return code
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
