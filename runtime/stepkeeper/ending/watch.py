"""Watch beside the training for what ends a process: notices, deadlines, and fences (another claim owns the root).

Each is written into the termination message at once, in case the process is killed.
"""

import os
import threading
import traceback
from collections.abc import Callable
from functools import partial
from typing import Final

from stepkeeper.contract import CommitPoint, EndKind, ExitCode, NoticeSource, OnDisruption, Termination
from stepkeeper.ending import message
from stepkeeper.ending.exits import FAILURE, STUCK, end_now, exit_code_of, find_known_cause
from stepkeeper.ending.fence import end_as_fenced_if
from stepkeeper.ending.machine import Ending
from stepkeeper.ending.notices import Notices
from stepkeeper.ending.parts import EndingParts
from stepkeeper.ending.schedule import Notice, Schedule, launcher_grace_s
from stepkeeper.errors import FencedError
from stepkeeper.fork_guard import forget_in_forks
from stepkeeper.log import CommitRecord
from stepkeeper.loggers import logger, run_briefly
from stepkeeper.training.cloud.announcements import Announcements

__all__ = ["EndWatch"]

_log: Final = logger("stepkeeper")


class EndWatch:
    """Hold the `Ending` of this process, and watch for events that change it. Any thread may call this."""

    def __init__(self, parts: EndingParts) -> None:
        self._parts, self._environment = parts, parts.environment
        steps, saver, environment = parts.steps, parts.saver, parts.environment
        settings = None if environment is None else environment.settings
        self.ending = Ending(saves_at_stop=settings is None or settings.on_disruption is OnDisruption.SAVE)
        self._lock, self._message_lock = threading.RLock(), threading.RLock()
        self._has_final_message = self._is_started = False
        self.notices: Final = Notices(
            Schedule.of_rank(
                parts.rank_group.rank,
                grace_s=None if environment is None else environment.identity.grace_s,
                launcher_s=launcher_grace_s(os.environ),
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

    def become(self, change: Callable[[Ending], Ending]) -> None:
        """Apply a change of the ending."""
        with self._lock:
            self.ending = change(self.ending)

    def forget_after_fork(self) -> None:
        """Close this object in a forked child: the training and its end are its parent's."""
        self._lock, self._message_lock = threading.RLock(), threading.RLock()
        self.become(lambda ending: ending.on_closed())

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

    def close(self, timeout_s: float) -> None:
        """Stop watching. The thread that listens to other ranks has `timeout_s` seconds to end."""
        self._announcements.close()
        self._parts.steps.decider.agreement.close(timeout_s)
        self.notices.close()

    def on_stop_agreed(self) -> None:
        """Record that all ranks stop. Another rank may be killed then, and its part of the save with it."""
        notices, kills = self.notices.schedule.notices, self._parts.steps.decider.kills
        # Without an agreement (the deadline came, or the program ended itself) this rank's own notices decide.
        if kills is None:
            kills = not notices or any(notice.kills for notice in notices)
        self.notices.record(NoticeSource.PEER, kills=kills)

    def write_message(
        self,
        code: int,
        error: str | None = None,
        *,
        failure: BaseException | None = None,
        is_final: bool = True,
    ) -> None:
        """Write this process's termination message, if there is an operator to read it.

        The process may still end differently after a message that isn't final. Such a message replaces no final one.
        """
        if self._environment is None:
            return
        with self._message_lock:
            if is_final or not self._has_final_message:
                self._has_final_message = is_final
                path = self._environment.places.termination_file
                message.write(path, self._describe(code, error, failure, is_final))

    def _describe(
        self, code: int, error: str | None, failure: BaseException | None, is_final: bool
    ) -> Termination:
        claimed, notice, ending = self._parts.companion.claimed_root, self.notices.first, self.ending
        lineage, rank = self._parts.saver.lineage, self._parts.rank_group.rank
        fails = EndKind.of(code) is EndKind.FAILED
        cause = find_known_cause(failure) if code == FAILURE else None
        if notice is not None:
            # The cloud's announcement explains an end after a notice better than the error that followed.
            cause = self._announcements.cause or cause
        kind = ending.kind_of(code)
        return Termination(
            code=code,
            kind=kind if is_final or code != ExitCode.SAVED else EndKind.STOPPING,
            step=self._parts.progress.step,
            root=None if claimed is None else claimed.root,
            committed=_point_of(lineage.own_commit),
            restored=_point_of(lineage.restored_commit),
            claim=None if claimed is None else claimed.claim.slot,
            cause=cause,
            notice=None if notice is None else notice.source,
            decision=ending.choice,
            agreed_step=ending.stop_step if code == ExitCode.SAVED else None,
            error=error,
            first_failure=None if failure is None or not fails else f"rank {rank}: {_name(failure)}",
            rank=rank,
        )

    def _on_first_notice(self, notice: Notice) -> None:
        """Ask all ranks to stop. Runs in the thread that recorded the notice."""
        self._parts.steps.decider.request_stop(asked=not notice.kills)
        # In case the process is killed before it has stopped.
        self.write_message(ExitCode.SAVED, is_final=False)
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
        stuck_since_s = self._parts.waits.stuck_since_s
        if stuck_since_s is not None and self.notices.schedule.is_overdue(stuck_since_s):
            # A fence or a lost rank may be why the call is stuck, and has its own exit code.
            why = self._parts.saver.failures.fence or self._parts.waits.loss
            code = ExitCode.SAVED if why is None else exit_code_of(why)
            text = None if why is None else str(why)
            end_now(code, STUCK, partial(self.write_message, code, text, is_final=False))
        self._parts.progress.send_latest_step()

    def _on_fence(self, fence: FencedError) -> None:
        """Write the message as soon as the root is known to be lost. Runs in the thread that found out."""
        if not self.ending.is_closed:
            self.write_message(ExitCode.FENCED, str(fence))


def _point_of(record: CommitRecord | None) -> CommitPoint | None:
    return None if record is None else CommitPoint(sequence=record.slot, step=record.step)


def _name(failure: BaseException) -> str:
    """Return an exception's type and the first line of its message, at most 200 characters."""
    return traceback.format_exception_only(failure)[0].splitlines()[0][:200]
