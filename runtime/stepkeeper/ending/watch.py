"""Watch beside the training for what ends a process: notices, deadlines, and fences (another claim owns the root).

Each is written into the termination message at once, in case the process is killed. `close` ends all of it.
"""

import os
import threading
import time
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Final

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import (
    CommitPoint,
    EndKind,
    ExitCode,
    NoticeSource,
    OnDisruption,
    ReportPhase,
    Termination,
)
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.ending import message
from stepkeeper.ending.exits import (
    FAILURE,
    STUCK,
    end_now,
    ending_in_time,
    exit_code_of,
    find_known_cause,
    format_traceback,
)
from stepkeeper.ending.fence import end_as_fenced_if
from stepkeeper.ending.machine import Ending
from stepkeeper.ending.notices import Notices
from stepkeeper.ending.schedule import Notice, Schedule, launcher_grace_s
from stepkeeper.errors import FencedError, NoticeDeadlineError
from stepkeeper.fork_guard import forget_in_forks
from stepkeeper.log import CommitRecord
from stepkeeper.loggers import logger, run_briefly
from stepkeeper.save.saver import Saver
from stepkeeper.training.cloud.announcements import Announcements
from stepkeeper.training.environment import Environment
from stepkeeper.training.steps import TrainSteps

__all__ = ["EndWatch", "EndingParts"]

_log: Final = logger("stepkeeper")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndingParts:
    """The parts of a manager that its end uses."""

    steps: TrainSteps
    saver: Saver
    rank_group: RankGroup
    progress: Progress
    companion: Companion
    waits: Waits
    environment: Environment | None
    """The identity and settings from the operator; None without an operator."""

    saves_on_notice: bool
    """True if a notice makes all ranks save one step and stop."""


class EndWatch:
    """Hold the `Ending` of this process, which the train thread replaces, and watch for events. For any thread."""

    def __init__(self, parts: EndingParts) -> None:
        self._parts, self._environment = parts, parts.environment
        steps, saver, environment = parts.steps, parts.saver, parts.environment
        settings = None if environment is None else environment.settings
        self.ending = Ending(saves_at_stop=settings is None or settings.on_disruption is OnDisruption.SAVE)
        self._message_lock = threading.RLock()
        self._has_final_message = self._is_started = False
        self.notices: Final = Notices(
            Schedule(
                grace_s=None if environment is None else environment.identity.grace_s,
                launcher_s=launcher_grace_s(os.environ),
                rank=parts.rank_group.rank,
            ),
            trigger=None if environment is None else environment.places.notice_file,
            on_first=self._on_first_notice,
            on_tick=self._on_tick,
        )
        self._announcements = Announcements(
            stop=partial(self.notices.record, NoticeSource.PREEMPTED),
            save=steps.decider.request_save,
            save_s=lambda: None if saver.cost is None else saver.cost.duration_s,
        )
        parts.waits.limit_by_notices(self.notices.wait_left_s)
        saver.failures.on_fence(self._on_fence, end_as_fenced_if, is_pods=environment is not None)
        forget_in_forks(self)

    def forget_after_fork(self) -> None:
        """Close this object in a forked child: the training and its end are its parent's."""
        self._message_lock = threading.RLock()
        self.ending = self.ending.on_closed()

    def start(self) -> None:
        """Watch for notices and other ranks' requests. A later call in the main thread may add SIGTERM."""
        if self.ending.is_closed:
            return
        if not self._is_started:
            self._is_started = True
            self._parts.steps.decider.agreement.start()
            self.notices.start(signals=self._parts.saves_on_notice)
            if self._parts.saves_on_notice:
                self._announcements.start()
            if self.notices.misses_sigterm:
                _log.warning(
                    "SIGTERM ends this process without a save: only the main thread can handle it, and the training "
                    "began in another one. The manager's next call in the main thread handles it"
                )
        elif self.notices.misses_sigterm and threading.current_thread() is threading.main_thread():
            self.notices.start(signals=self._parts.saves_on_notice)

    def on_stop_agreed(self) -> None:
        """Record that all ranks stop. Another rank may be killed then, and its part of the save with it."""
        notices, kills = self.notices.schedule.notices, self._parts.steps.decider.kills
        # Without an agreement (the deadline came, or the program ended itself) this rank's own notices decide.
        if kills is None:
            kills = not notices or any(notice.kills for notice in notices)
        self.notices.record(NoticeSource.PEER, kills=kills)

    def write_message(
        self, code: int, error: str | None = None, *, failure: BaseException | None = None
    ) -> None:
        """Write this process's termination message, if there is an operator to read it.

        Until the manager is closed, a stop may still end with another code: its message replaces none of another code.
        """
        if self._environment is None:
            return
        is_final = self.ending.is_closed or code != ExitCode.SAVED
        with self._message_lock:
            if is_final or not self._has_final_message:
                self._has_final_message = is_final
                message.write(self._environment.places.termination_file, self._describe(code, error, failure))

    def _describe(self, code: int, error: str | None, failure: BaseException | None) -> Termination:
        claimed, notice, ending = self._parts.companion.claimed_root, self.notices.first, self.ending
        lineage, rank = self._parts.saver.lineage, self._parts.rank_group.rank
        cause = find_known_cause(failure) if code == FAILURE else None
        if notice is not None:
            # The cloud's announcement explains an end after a notice better than the error that followed.
            cause = self._announcements.cause or cause
        kind = ending.kind_of(code)
        first = None
        if failure is not None and kind is EndKind.FAILED:
            # The error's type and the first line of its message.
            name = traceback.format_exception_only(failure)[0].splitlines()[0][:200]
            first = f"rank {rank}: {name}"
        return Termination(
            code=code,
            kind=kind,
            step=self._parts.progress.step,
            root=None if claimed is None else claimed.root,
            committed=_point_of(lineage.own_commit),
            restored=_point_of(lineage.restored_commit),
            claim=None if claimed is None else claimed.claim.slot,
            cause=cause,
            notice=None if notice is None else notice.source,
            decision=f"the last save was tried {ending.n_tries} times" if ending.n_tries > 1 else None,
            agreed_step=ending.stop_step if code == ExitCode.SAVED else None,
            error=error,
            first_failure=first,
            rank=rank,
        )

    def close(self, code: int, error: BaseException | None, *, exits: bool) -> None:
        """Write the termination message, send the last report, and close all parts, because of `error` if not None.

        `exits`: the process then exits with `code`.
        """
        if code == ExitCode.DONE:
            self._parts.progress.set_phase(ReportPhase.DONE)
        text = None if error is None else format_traceback(error)
        if text is not None:
            self._parts.progress.set_error(text)
        # A failure would end the other ranks' waits. After a missed deadline their save may still be committed.
        failure = None if isinstance(error, NoticeDeadlineError) else error
        if exits:
            self.notices.keep_exit_code(code)
        schedule = self.notices.schedule
        ends_s = time.monotonic() + schedule.closing_timeout_s

        def lasts() -> bool:
            return exits and self.notices.schedule.kill_s is not None

        with ending_in_time(schedule.end_left_s, code, lasts=lasts):
            self.ending = self.ending.close_with(code).on_closed()
            self.write_message(code, text or self._parts.saver.error, failure=failure)
            self._close_parts(code, failure, ends_s)

    def _close_parts(self, code: int, failure: BaseException | None, ends_s: float) -> None:
        """Close all parts by `ends_s`. Each gets a share of the time that is left.

        The other ranks come first: they may be waiting for this one or its error.
        """

        def share_s(part: float) -> float:
            return part * max(0.0, ends_s - time.monotonic())

        parts = self._parts
        parts.rank_group.announce_leave(failure, share_s(1 / 4))
        parts.rank_group.abort()
        self._announcements.close()
        parts.steps.decider.agreement.close(share_s(1 / 3))
        self.notices.close()
        parts.progress.send_latest_step()
        parts.companion.close(share_s(7 / 8))
        parts.saver.close(share_s(1 / 2))
        # A lost rank reads no broadcast. A training that is done has awaited its hooks already.
        if code != ExitCode.PEER_LOST:
            parts.rank_group.leave(share_s(1 if code == ExitCode.DONE else 1 / 2))
        if code != ExitCode.DONE:
            parts.saver.await_hooks(share_s(1))

    def _on_first_notice(self, notice: Notice) -> None:
        """Ask all ranks to stop. Runs in the thread that recorded the notice."""
        self._parts.steps.decider.request_stop(asked=not notice.kills)
        # In case the process is killed before it has stopped.
        self.write_message(ExitCode.SAVED)
        self._parts.progress.record_notice(notice.source)
        run_briefly(partial(_log.warning, "notice (%s): all ranks save one step and stop", notice.source))

    def _on_tick(self) -> None:
        """Run all periodic checks. Runs five times a second."""
        agreement = self._parts.steps.decider.agreement
        if agreement.agreed_stop is not None:
            # This rank hasn't reached that step yet, and may be in a wait that the notice must end.
            self.on_stop_agreed()
        if agreement.received_early_stop:
            self.notices.record(NoticeSource.PEER)
        self._announcements.check()
        stuck_since_s = None if self.ending.is_closed else self._parts.waits.stuck_since_s
        if stuck_since_s is not None and self.notices.schedule.is_overdue(stuck_since_s):
            # A fence or a lost rank may be why the call is stuck, and has its own exit code.
            why = self._parts.saver.failures.fence or self._parts.waits.loss
            code = ExitCode.SAVED if why is None else exit_code_of(why)
            text = None if why is None else str(why)
            end_now(code, STUCK, partial(self.write_message, code, text))
        self._parts.progress.send_latest_step()

    def _on_fence(self, fence: FencedError) -> None:
        """Write the message as soon as the root is known to be lost. Runs in the thread that found out."""
        if not self.ending.is_closed:
            self.write_message(ExitCode.FENCED, str(fence))


def _point_of(record: CommitRecord | None) -> CommitPoint | None:
    return None if record is None else CommitPoint(sequence=record.slot, step=record.step)
