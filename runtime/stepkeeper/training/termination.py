"""End a process: choose its exit code, share out the grace period, and write the termination-message file."""

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
    END_RESERVE_S,
    Cause,
    CommitPoint,
    ExitCode,
    OnDisruption,
    Termination,
)
from stepkeeper.errors import FencedError, NoticeDeadlineError, PeerLostError
from stepkeeper.log import CommitRecord
from stepkeeper.loggers import logger, tell_briefly
from stepkeeper.process_end.known_causes import find_known_cause
from stepkeeper.process_end.last_words import count_restarts, leave_last_word
from stepkeeper.training.announcements import PREEMPTED
from stepkeeper.training.environment import Environment
from stepkeeper.training.preemption import Notice, NoticeWatcher

__all__ = ["ProcessExit", "format_traceback", "process_exit_code"]

_log: Final = logger(__name__)
_CLOSING_S: Final = 9.0
_CLOSING_STOPPED_S: Final = 4.0
_CLOSING_LATE_S: Final = 0.9
"""Seconds of END_RESERVE_S that the end of the manager gets."""

_LAST_RESORT_S: Final = 0.3
"""Seconds before the end of the grace period at which a process that hasn't ended by itself is ended."""

_LEAST_END_S: Final = 0.5
"""Seconds that a process has to end by itself that comes to its end when the grace period is as good as over."""

_PYTHONS_END_S: Final = 1.0
"""Seconds for the interpreter's own end after the manager's, where nobody has said how long the grace period is."""

_SILENCE_S: Final = 22.0
"""Seconds that a notice leaves to a wait without progress where nobody has said how long the grace period is.
Kubernetes and Slurm kill 30 s after SIGTERM unless they are told otherwise.
"""

_PREEMPTED_S: Final = 15.0
"""Seconds that a machine which the cloud preempts leaves to a pod: it goes after 30, and GKE's kubelet keeps half of
them for the system's pods.
"""

_KILLERS: Final = ("sigterm", "file", PREEMPTED)
"""Sources of notices behind which somebody kills the process soon. A rank that was told by another one hears from that
when it leaves.
"""

_SAVE_S: Final = 60.0
_SAVE_TOGETHER_S: Final = 10.0
"""The same with other ranks, who may have ended already."""

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
    """Share out the time that is left when a process ends, and write down how it ended.

    Without an operator there is no grace period, and nobody reads a termination message.
    """

    def __init__(
        self,
        environment: Environment | None,
        companion: Companion,
        progress: Progress,
        notices: NoticeWatcher,
        *,
        announced_cause: Callable[[], Cause | None] = lambda: None,
        decision: Callable[[], str | None] = lambda: None,
        rank: int,
    ) -> None:
        """Know the parts that tell how the process ends.

        Args:
            environment: What the operator told this process; None without an operator.
            companion: Knows the claim.
            progress: Knows the last step.
            notices: Know whether the process was asked to stop.
            announced_cause: Returns the cause that the cloud has announced for an end that comes now, if it has.
            decision: Returns what was chosen to be saved in the time that was left, and why.
            rank: This process's rank.

        """
        self._final_lock = threading.Lock()
        self._is_final_written = False
        self._announced_cause = announced_cause
        self._decision = decision
        self._environment = environment
        self._rank = rank
        self._companion = companion
        self._progress = progress
        self._notices = notices

    @property
    def is_pods(self) -> bool:
        """True if an operator's pod is ended by this manager's training."""
        return self._environment is not None

    @property
    def saves_before_stop(self) -> bool:
        """True if a notice makes all ranks save one step before they stop."""
        return self._environment is None or self._environment.settings.on_disruption is OnDisruption.SAVE

    def grace_left_s(self) -> float | None:
        """Return the seconds left of the grace period; None without a notice, or if nobody has said how long it is."""
        ends_s = self._grace_ends_s
        return None if ends_s is None else max(0.0, ends_s - END_RESERVE_S - time.monotonic())

    @property
    def _grace_ends_s(self) -> float | None:
        """The end of the grace period, by time.monotonic(), as the notice says that leaves the least time."""
        notices, environment = self._notices.notices, self._environment
        if not notices or environment is None:
            return None
        return min(_grace_ends_s(notice, environment.identity.grace_s) for notice in notices)

    def wait_left_s(self, progress_s: float) -> float | None:
        """Return how many more seconds a wait may take; None without a notice.

        A known grace period ends all waits at its end. Where nobody has said how long it is, a wait, or a save, goes
        on as long as it makes progress.

        Args:
            progress_s: Time at which the wait began or a save made its last progress, by time.monotonic().

        """
        if self._environment is not None:
            return self.grace_left_s()
        told_s = self._kill_told_s
        if told_s is None:
            return None
        return max(0.0, _SILENCE_S - (time.monotonic() - max(told_s, progress_s)))

    @property
    def _is_to_be_killed(self) -> bool:
        return self._kill_told_s is not None

    @property
    def _kill_told_s(self) -> float | None:
        """Time of the first notice behind which somebody kills the process soon; None if there is none yet.

        That need not be the first notice: Slurm may send SIGUSR1 long before SIGTERM, and another rank may have had
        its SIGTERM sooner.
        """
        told = [notice.monotonic_s for notice in self._notices.notices if notice.source in _KILLERS]
        return min(told, default=None)

    def is_overdue(self, stuck_since_s: float) -> bool:
        """Tell whether the process, which is in a call, would be killed in a moment.

        The grace period of a notice is as good as over. Where nobody has said how long it is, the call has gone on for
        longer than any wait and the end of the process may take.

        Args:
            stuck_since_s: Time at which the call began or a save made its last progress, by time.monotonic().

        """
        now_s, ends_s, told_s = time.monotonic(), self._grace_ends_s, self._kill_told_s
        if ends_s is not None:
            return now_s >= ends_s - _LAST_RESORT_S
        if told_s is None:
            return False
        limit_s = _SILENCE_S + _CLOSING_STOPPED_S + _PYTHONS_END_S
        return now_s >= max(told_s, stuck_since_s) + limit_s

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
        left_s = self._end_left_s()
        ended = threading.Event()

        def end() -> None:
            if not ended.wait(left_s):
                self.end_stuck(code)

        if left_s is not None:
            threading.Thread(target=end, name="stepkeeper-end", daemon=True).start()
        try:
            yield
        finally:
            if not (for_good and self._is_to_be_killed and self._grace_ends_s is not None):
                ended.set()

    def _end_left_s(self) -> float | None:
        """Return how many seconds the end of the process may take; None if nobody kills it for a notice."""
        ends_s = self._grace_ends_s
        if ends_s is not None:
            return max(_LEAST_END_S, ends_s - _LAST_RESORT_S - time.monotonic())
        return self.closing_timeout_s() + _PYTHONS_END_S if self._is_to_be_killed else None

    def closing_timeout_s(self) -> float:
        """Return how many seconds the end of the manager may take: the last report, and all that it waits for."""
        left_s = self.grace_left_s()
        if left_s is None:
            return _CLOSING_STOPPED_S if self._is_to_be_killed else _CLOSING_S
        return min(_CLOSING_STOPPED_S, left_s + _CLOSING_LATE_S)

    def save_timeout_s(self, *, alone: bool) -> float:
        """Return how many seconds a save in flight may take when an exception ends the process.

        Args:
            alone: True if no other rank has to take part in the save.

        """
        most_s, left_s = _SAVE_S if alone else _SAVE_TOGETHER_S, self.grace_left_s()
        return most_s if left_s is None else min(most_s, left_s)

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


def _grace_ends_s(notice: Notice, grace_s: float) -> float:
    return notice.monotonic_s + (min(grace_s, _PREEMPTED_S) if notice.source == PREEMPTED else grace_s)


def _point_of(record: CommitRecord | None) -> CommitPoint | None:
    return None if record is None else CommitPoint(sequence=record.slot, step=record.step)
