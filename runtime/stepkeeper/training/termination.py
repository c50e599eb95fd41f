"""End a process: choose its exit code, share out the grace period, and write the termination-message file."""

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

__all__ = ["ProcessExit", "format_traceback", "process_exit_code"]

_log: Final = logger(__name__)
_CLOSING_S: Final = 9.0
_CLOSING_STOPPED_S: Final = 4.0
_CLOSING_LATE_S: Final = 0.9
_RESERVE_S: Final = 1.5
"""Seconds of the grace period that are kept for the last report, within `_CLOSING_LATE_S`, and for the interpreter's
own end."""

_SAVE_S: Final = 60.0
_SAVE_TOGETHER_S: Final = 10.0
"""The same with other ranks, who may have ended already."""

_FAILURE: Final = 1
_INTERRUPTED: Final = 130


def process_exit_code(error: BaseException) -> int:
    """Return the code that a process ends with when `error` ends it."""
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


def format_traceback(error: BaseException) -> str | None:
    """Format `error` for people; None if the process chose to end and gave no message."""
    if isinstance(error, SystemExit):
        return None if isinstance(error.code, int | None) else str(error.code)
    return "".join(traceback.format_exception(error))


class ProcessExit:
    """Share out the time that is left when a process ends, and write down how it ended.

    Without an operator there is no grace period, and nobody reads a termination message.
    """

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
    def saves_before_stop(self) -> bool:
        """True if a notice makes all ranks save one step before they stop."""
        return self._environment is None or self._environment.settings.on_disruption is OnDisruption.SAVE

    def grace_left_s(self) -> float | None:
        """Return the seconds left of the grace period; None without a notice, or if nobody has said how long it is."""
        notice = self._notices.notice
        if notice is None or self._environment is None:
            return None
        passed_s = time.monotonic() - notice.monotonic_s
        return max(0.0, self._environment.identity.grace_s - _RESERVE_S - passed_s)

    def closing_timeout_s(self) -> float:
        """Return how many seconds the last report and the end of the companion may take."""
        left_s = self.grace_left_s()
        return _CLOSING_S if left_s is None else min(_CLOSING_STOPPED_S, left_s + _CLOSING_LATE_S)

    def save_timeout_s(self, *, alone: bool) -> float:
        """Return how many seconds a save in flight may take when an exception ends the process.

        Args:
            alone: True if no other rank has to take part in the save.

        """
        most_s, left_s = _SAVE_S if alone else _SAVE_TOGETHER_S, self.grace_left_s()
        return most_s if left_s is None else min(most_s, left_s)

    def write_termination_message(self, code: int, newest: CommitRecord | None, error: str | None) -> None:
        """Write what is known now of how this process ends into the termination-message file.

        Args:
            code: The exit code.
            newest: The newest commit that this process made or restored, if any.
            error: What went wrong, for people.

        """
        if self._environment is None:
            return
        claimed, notice = self._companion.claimed_root, self._notices.notice
        _write(
            self._environment.places.termination_file,
            Termination(
                code=code,
                step=self._progress.step,
                root=None if claimed is None else claimed.root,
                sequence=None if newest is None else newest.slot,
                claim=None if claimed is None else claimed.claim.slot,
                notice=None if notice is None else notice.source,
                error=error,
            ),
        )


def _write(path: Path, termination: Termination) -> None:
    """Write the termination message; log it if that fails.

    The process ends either way, and its exit code says most of it. If the process is killed meanwhile, either an
    earlier message or this one can be read: the file is the kubelet's, so it can't be replaced by another file, and
    it is never emptied first.
    """
    said = termination.to_json()
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Trailing blanks don't change a JSON text.
            os.pwrite(fd, said.ljust(os.fstat(fd).st_size), 0)
            os.ftruncate(fd, len(said))
        finally:
            os.close(fd)
    except OSError as error:
        _log.warning("the termination message can't be written to %s: %s", path, error)
