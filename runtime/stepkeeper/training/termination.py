"""End a process: choose its exit code, end it in time, and write the termination-message file."""

import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import (
    Cause,
    CommitPoint,
    ExitCode,
    OnDisruption,
    Termination,
)
from stepkeeper.errors import FencedError, NoticeDeadlineError, PeerLostError
from stepkeeper.log import CommitRecord
from stepkeeper.loggers import logger, tell_briefly
from stepkeeper.process_end.exit_timer import ExitTimer
from stepkeeper.process_end.known_causes import find_known_cause
from stepkeeper.process_end.last_words import count_restarts, leave_last_word
from stepkeeper.training.environment import Environment
from stepkeeper.training.grace_period import GracePeriod
from stepkeeper.training.notices.watcher import NoticeWatcher

__all__ = ["ProcessExit", "format_traceback", "process_exit_code"]

_log: Final = logger(__name__)

_LAST_MOMENT_S: Final = 0.15
"""Seconds after the last resort at which a process ends in which no thread of Python could do that: while the
interpreter is taken down, they all stand still.
"""

_FAILURE: Final = 1
_INTERRUPTED: Final = 130
_CODES: Final = (
    (FencedError, ExitCode.FENCED),
    (PeerLostError, ExitCode.PEER_LOST),
    (NoticeDeadlineError, ExitCode.SAVED),
    (KeyboardInterrupt, _INTERRUPTED),
)


def process_exit_code(error: BaseException) -> int:
    """Return the code that a process ends with when `error` ends it."""
    match error:
        case SystemExit(code=None):
            return ExitCode.DONE
        case SystemExit(code=int(code)):
            return code
        case _:
            return next((code for kind, code in _CODES if isinstance(error, kind)), _FAILURE)


def format_traceback(error: BaseException) -> str | None:
    """Format `error` for people; None if the process chose to end and gave no message."""
    if isinstance(error, SystemExit):
        return None if isinstance(error.code, int | None) else str(error.code)
    return "".join(traceback.format_exception(error))


class ProcessExit:
    """End the process where it doesn't end by itself in time, and write down how it ended.

    Without an operator nobody reads a termination message.
    """

    def __init__(
        self,
        environment: Environment | None,
        companion: Companion,
        progress: Progress,
        notices: NoticeWatcher,
        grace: GracePeriod,
        *,
        announced_cause: Callable[[], Cause | None] = lambda: None,
        decision: Callable[[], str | None] = lambda: None,
        has_agreed: Callable[[], bool] = lambda: False,
        rank: int,
    ) -> None:
        """Know the parts that tell how the process ends.

        Args:
            environment: What the operator told this process; None without an operator.
            companion: Knows the claim.
            progress: Knows the last step.
            notices: Know whether the process was asked to stop.
            grace: Knows how much time a notice leaves.
            announced_cause: Returns the cause that the cloud has announced for an end that comes now, if it has.
            decision: Returns what was chosen to be saved in the time that was left, and why.
            has_agreed: Tells whether this rank has come to a step that all ranks have agreed to stop at.
            rank: This process's rank.

        """
        self._final_lock = threading.Lock()
        self._is_final_written = False
        self._announced_cause = announced_cause
        self._decision = decision
        self._has_agreed = has_agreed
        self._environment = environment
        self._rank = rank
        self._companion = companion
        self._progress = progress
        self._notices = notices
        self._grace = grace

    @property
    def is_pods(self) -> bool:
        """True if an operator's pod is ended by this manager's training."""
        return self._environment is not None

    @property
    def saves_before_stop(self) -> bool:
        """True if a notice makes all ranks save one step before they stop."""
        return self._environment is None or self._environment.settings.on_disruption is OnDisruption.SAVE

    def end_stuck(self, code: int, leave_word: Callable[[], None] = lambda: None) -> None:
        """End the process where it is stuck in one of the manager's calls. It would be killed in a moment.

        Args:
            code: The exit code.
            leave_word: Writes the termination message, where that hasn't been done yet.

        """
        try:
            tell_briefly(leave_word, _tell_stuck)
        finally:
            os._exit(code)

    @contextmanager
    def end_in_time(self, code: int, *, for_good: bool) -> Iterator[None]:
        """End the process with `code` at the end of a notice's time, if what runs within hasn't ended by then.

        Args:
            code: The exit code.
            for_good: True if the process ends behind the block. Where it is to be killed at a known time, that, too,
                has to happen before: the interpreter waits for threads and calls what others have registered. Else the
                program may take all its time behind the block.

        """
        left_s = self._grace.end_left_s()
        ended = threading.Event()

        def end() -> None:
            if not ended.wait(left_s):
                self.end_stuck(code)
            timer.cancel()

        if left_s is not None:
            timer = ExitTimer(code, time.monotonic() + left_s + _LAST_MOMENT_S)
            threading.Thread(target=end, name="stepkeeper-end", daemon=True).start()
        try:
            yield
        finally:
            if not (for_good and self._grace.is_killed_at_known_time):
                ended.set()

    def write_termination_message(
        self,
        code: int,
        *,
        committed: CommitRecord | None,
        restored: CommitRecord | None,
        error: str | None = None,
        failure: BaseException | None = None,
        is_final: bool = True,
    ) -> None:
        """Write what is known now of how this process ends into the termination-message file.

        Args:
            code: The exit code.
            committed: The newest commit that this process made, if any.
            restored: The commit that it restored last, if any.
            error: What went wrong, for people.
            failure: What ends the process, where that is an exception.
            is_final: False for a process that may still end otherwise. Nothing is written so once a final message is.

        """
        with self._final_lock:
            if is_final or not self._is_final_written:
                self._is_final_written = is_final
                cause = find_known_cause(failure) if code == _FAILURE else None
                self._write_message(code, cause, committed=committed, restored=restored, error=error)

    def _write_message(
        self,
        code: int,
        cause: Cause | None,
        *,
        committed: CommitRecord | None,
        restored: CommitRecord | None,
        error: str | None,
    ) -> None:
        if self._environment is None:
            return
        claimed, notice = self._companion.claimed_root, self._notices.notice
        leave_last_word(
            self._environment.places.termination_file,
            Termination(
                code=code,
                step=self._progress.step,
                root=None if claimed is None else claimed.root,
                committed=_point_of(committed),
                restored=_point_of(restored),
                claim=None if claimed is None else claimed.claim.slot,
                cause=cause if notice is None else self._announced_cause() or cause,
                notice=None if notice is None else notice.source,
                decision=self._decision(),
                agreed=True if code == ExitCode.SAVED and self._has_agreed() else None,
                error=error,
                rank=self._rank,
                restart=count_restarts(),
            ),
        )


def _tell_stuck() -> None:
    """Write the stacks of all threads to stderr, and the reason to the log."""
    # By way of memory: faulthandler holds Python's lock as long as stderr takes nothing.
    with os.fdopen(os.memfd_create("stacks"), "w+b", buffering=0) as memory:
        faulthandler.dump_traceback(memory)
        memory.seek(0)
        stacks = memory.read()
    while stacks:
        stacks = stacks[os.write(2, stacks) :]
    _log.critical("the grace period is over, and the training is stuck in a call; the process ends here")


def _point_of(record: CommitRecord | None) -> CommitPoint | None:
    return None if record is None else CommitPoint(sequence=record.slot, step=record.step)
