"""How a process ends: its exit code, and its last word in the termination-message file."""

import os
import time
import traceback
from pathlib import Path
from typing import Final

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import ExitCode, OnDisruption, Termination
from stepkeeper.errors import FencedError, PeerLostError
from stepkeeper.log import CommitRecord
from stepkeeper.loggers import logger
from stepkeeper.training.environment import Environment
from stepkeeper.training.preemption import NoticeWatcher

__all__ = ["Ending", "exit_code_of", "traceback_of"]

_log: Final = logger(__name__)
_CLOSING_S: Final = 9.0
_CLOSING_STOPPED_S: Final = 4.0
_CLOSING_LATE_S: Final = 0.9
_RESERVE_S: Final = 1.5
"""Kept of the grace period for the last report, within `_CLOSING_LATE_S`, and the interpreter's own end."""

_SAVE_S: Final = 60.0
_SAVE_TOGETHER_S: Final = 10.0
"""With other ranks, who may have ended already."""

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
        case PeerLostError():
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


class Ending:
    """What a process has to say and to watch when it ends. Without an operator there is nobody to say it to."""

    def __init__(
        self,
        environment: Environment | None,
        companion: Companion,
        progress: Progress,
        notices: NoticeWatcher,
    ) -> None:
        self._environment = environment
        self._companion = companion
        self._progress = progress
        self._notices = notices

    @property
    def saves_first(self) -> bool:
        """True if a notice is to save one step."""
        return self._environment is None or self._environment.settings.on_disruption is OnDisruption.SAVE

    def left_s(self) -> float | None:
        """Of the grace period; None where there is no notice, or nobody has said how long it is."""
        notice = self._notices.notice
        if notice is None or self._environment is None:
            return None
        passed_s = time.monotonic() - notice.monotonic_s
        return max(0.0, self._environment.identity.grace_s - _RESERVE_S - passed_s)

    def closing_s(self) -> float:
        """How long the last report and the end of the companion may take."""
        left_s = self.left_s()
        return _CLOSING_S if left_s is None else min(_CLOSING_STOPPED_S, left_s + _CLOSING_LATE_S)

    def save_s(self, *, alone: bool) -> float:
        """How long a save in flight may take when an exception ends the process."""
        most_s, left_s = _SAVE_S if alone else _SAVE_TOGETHER_S, self.left_s()
        return most_s if left_s is None else min(most_s, left_s)

    def last_word(self, code: int, newest: CommitRecord | None, error: str | None) -> None:
        """The termination message says what is known now of how this process ends."""
        if self._environment is None:
            return
        begun, notice = self._companion.begun, self._notices.notice
        _write(
            self._environment.places.termination_file,
            Termination(
                code=code,
                step=self._progress.step,
                root=None if begun is None else begun.root,
                sequence=None if newest is None else newest.slot,
                claim=None if begun is None else begun.claim.slot,
                notice=None if notice is None else notice.source,
                error=error,
            ),
        )


def _write(path: Path, termination: Termination) -> None:
    """A file that can't be written is logged, no more: the process ends either way, and its code says most of it.

    Whenever the process is killed, an earlier word or this one can be read: the file is the kubelet's, so it can't be
    replaced by another one, and it is never emptied first.
    """
    said = termination.to_json()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Blanks behind a JSON text are part of none.
            os.pwrite(fd, said.ljust(os.fstat(fd).st_size), 0)
            os.ftruncate(fd, len(said))
        finally:
            os.close(fd)
    except OSError as error:
        _log.warning("the termination message can't be written to %s: %s", path, error)
