"""Choose the exit code of the pod: the one that the training meant, which its launcher may have replaced."""

import json
from pathlib import Path
from typing import Final

from stepkeeper.contract import ExitCode, NoticeSource, Termination

__all__ = ["choose_exit_code", "read_torchrun_error"]

_STORE_LOST: Final = "DistNetworkError: "
_STOPPED: Final = "SignalException: "
"""Starts of torchrun's error texts: it lost its store, or got a signal."""

_NEVER_CAME: Final = "timed out"
"""Part of a DistNetworkError's text if no connection was made. A host that never came isn't lost."""


def choose_exit_code(code: int, message: Termination | None, *, was_asked_to_stop: bool) -> int:
    """Return the code to end with.

    The rules, in this order:
    - The launcher's code 0 counts: it may have restarted its processes after one of them had failed.
    - A message that training is done counts if the launcher was asked to stop: it may have failed after that.
    - A process that SIGTERM stopped, though the launcher wasn't asked to stop, was stopped by the launcher, because
      another one failed without a message: the launcher's code counts. If all ranks had agreed on a stop step, none had
      failed before, and this rule doesn't apply.
    - Otherwise the message counts. It has more information than the launcher's code, which is always 1 for torchrun.
    """
    if code == ExitCode.DONE or message is None:
        return code
    if message.code == ExitCode.DONE:
        return ExitCode.DONE if was_asked_to_stop else code
    stopped_by_launcher = (
        message.code == ExitCode.SAVED and message.notice == NoticeSource.SIGTERM and not was_asked_to_stop
    )
    return code if stopped_by_launcher and message.agreed_step is None else message.code


def read_torchrun_error(path: Path) -> Termination | None:
    """Read why torchrun failed before its processes trained, if the reason is a lost host or a notice.

    The torchrun in rank 0's pod has the rendezvous store of all hosts. `path` has the exception that ended it.
    """
    try:
        message = json.loads(path.read_bytes())["message"]
    except (OSError, ValueError, KeyError, TypeError):
        # There is no such file: torchrun had no exception, or the command isn't torchrun.
        return None
    # As torch does, read both forms of such files: an object and a text.
    text = message.get("message") if isinstance(message, dict) else message
    if not isinstance(text, str):
        return None
    if text.startswith(_STORE_LOST) and _NEVER_CAME not in text:
        return Termination(code=ExitCode.PEER_LOST, error=text)
    stopped = Termination(code=ExitCode.SAVED, notice=NoticeSource.SIGTERM)
    return stopped if text.startswith(_STOPPED) else None
