"""Carry out what is to be done after each step: nothing, a save, or one last save and the stop of all ranks."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final
from weakref import WeakMethod

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import Directive, ExitCode, ReportPhase
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import NoticeDeadlineError, PeerLostError
from stepkeeper.loggers import logger, tell_briefly
from stepkeeper.policy.save import AnyOf, Disruptions, OnPreemption, SavePolicy, parts_of
from stepkeeper.save.given_state import SaveRequest
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.saver import Saver
from stepkeeper.training.disruptions import DisruptionHistory
from stepkeeper.training.environment import Environment
from stepkeeper.training.grace_period import GracePeriod, launcher_grace_s
from stepkeeper.training.last_step import LastStep
from stepkeeper.training.notices.announcements import Announcements
from stepkeeper.training.notices.data_loaders import bearing_ends_of_children
from stepkeeper.training.notices.watcher import Notice, NoticeWatcher
from stepkeeper.training.save_decision import SaveConditions, SaveDecider
from stepkeeper.training.stop_save import StopSave
from stepkeeper.training.termination import ProcessExit, process_exit_code

__all__ = ["StepController"]

_log: Final = logger(__name__)
_STOPS_S: Final = 60.0
"""Seconds by which ranks may come apart to the step that they stop at, unless the grace period is shorter."""


class StepController:
    """Bring together the save policy, notices and the operator's directives for the train loop."""

    def __init__(
        self,
        policy: SavePolicy,
        rank_group: RankGroup,
        saver: Saver,
        *,
        progress: Progress,
        companion: Companion,
        environment: Environment | None,
        saves_on_notice: bool,
        waits: Waits | None = None,
        on_met: Callable[[], None] = lambda: None,
    ) -> None:
        """Construct the controller; it listens to nothing before `start`.

        Args:
            policy: The policy that decides which steps are saved.
            rank_group: The ranks that save together.
            saver: Makes the saves.
            progress: Told of each step, for reports.
            companion: The companion, which knows of earlier disruptions once it has claimed the root.
            environment: What the operator told this process; None without an operator.
            saves_on_notice: True if a notice makes all ranks save one step and stop.
            waits: Knows whether the training is in a call, and gets the time that a notice leaves.
            on_met: Called in a thread of several ranks when all of them have come to the training.

        Raises:
            ValueError: `policy` saves on preemption, but `saves_on_notice` is False.

        """
        if OnPreemption() in parts_of(policy) and not saves_on_notice:
            raise ValueError("OnPreemption() and chkpt_on_preemption=False contradict each other")
        self._saver = saver
        self._progress = progress
        self._companion = companion
        self.saves_on_notice: Final = saves_on_notice
        self.stopped = False
        self._started = self._closed = False
        self._disruption_history = DisruptionHistory()
        policy = AnyOf((policy, OnPreemption())) if saves_on_notice else policy
        self._waits = waits or Waits()
        held = WeakMethod(self._hear_early_stop)

        def hear_early_stop() -> None:
            if (hear := held()) is not None:
                hear()

        self.decider: Final = SaveDecider(
            policy,
            rank_group,
            self._read_conditions,
            self._waits,
            on_met,
            on_early_stop=hear_early_stop,
        )
        trigger = None if environment is None else environment.places.notice_file
        self.notices: Final = NoticeWatcher(trigger, self._on_tick, self._on_notice)
        self.last_step: Final = LastStep()
        self._announcements = announcements = Announcements(
            stop=self.notices.record_notice, save=self.decider.request_save, save_s=self._read_save_s
        )
        decider, stop_save = self.decider, StopSave(saver, rank_group)
        self.stop_save: Final = stop_save
        grace_s = None if environment is None else environment.identity.grace_s
        self.grace: Final = GracePeriod(grace_s, self.notices, launcher_s=launcher_grace_s(os.environ))
        self.process_exit: Final = ProcessExit(
            environment,
            companion,
            progress,
            self.notices,
            self.grace,
            announced_cause=lambda: announcements.cause,
            decision=lambda: stop_save.choice,
            has_agreed=lambda: decider.stop_step is not None,
            rank=rank_group.rank,
        )
        self._waits.heed_notices(self.grace.wait_left_s)

    def start(self) -> None:
        """Start to listen to notices and to the requests of other ranks, because this process trains.

        Called again, it makes up for SIGTERM if the first call came in another thread than the main one. A manager
        that only looks at a root never calls this: it has no thread, and leaves SIGTERM to others.

        Ranks:
            All ranks call this.

        """
        if self._closed:
            return
        if not self._started:
            self._started = True
            self.decider.start()
            self.notices.start(signals=self.saves_on_notice)
            if self.saves_on_notice:
                self._announcements.start()
            if self.notices.misses_sigterm:
                _log.warning(
                    "SIGTERM ends this process without a save: only the main thread can take it, and the training "
                    "began in another one. The first call there that trains on takes it"
                )
        elif self.notices.misses_sigterm and threading.current_thread() is threading.main_thread():
            self.notices.start(signals=self.saves_on_notice)

    @property
    def agreed_to_stop(self) -> bool:
        """True if all ranks agreed on a step to stop at, and this rank has reached it."""
        return self.saves_on_notice and self.decider.stop_step is not None

    def should_stop_at(self, step: int) -> bool:
        """Return True from the step on that all ranks agreed to stop at.

        Requests are agreed on here even if the caller doesn't stop.

        Ranks:
            All ranks call this after each step.

        """
        self.start()
        return self.decider.should_stop_at(step)

    def on_step_finished(self, request: SaveRequest) -> None:
        """Record a finished step for reports."""
        self.start()
        self._progress.record_step(request.step, request.metrics)

    def is_save_due(self, step: int) -> bool:
        """Return True if the policy or a request asks to save `step`. Call `should_stop_at` for the same step first."""
        return self.decider.is_save_due(step)

    def should_save(self, step: int) -> bool:
        """Return True if the policy, a request or the agreed stop asks to save `step`."""
        stopping = self.should_stop_at(step)
        last = self._saver.newest_save
        saved = last is not None and last.step >= (self.decider.stop_step or 0)
        return self.decider.is_save_due(step, stopping=stopping and not saved)

    def start_save(self, request: SaveRequest) -> InFlight:
        """Start a save and restart the policy's clock."""
        self.decider.on_save_started()
        # If it can't be started the caller is told so, and the end doesn't try it again.
        return self._saver.start_save(self.last_step.follow_save(request))

    @property
    def unsaved_step(self) -> SaveRequest | None:
        """The last finished step, if a training that ends here still has to save it."""
        request, saved = self.last_step.request, self._saver.newest_save
        skips = self.notices.notice is not None and not self.process_exit.saves_before_stop
        if self.stopped or request is None or skips or (saved is not None and saved.step >= request.step):
            return None
        return replace(request, is_last=True)

    def close(self, timeout_s: float) -> None:
        """Stop listening to notices and requests. What listens to requests has `timeout_s` seconds to end."""
        self._closed = True
        self._announcements.close()
        self.decider.close(timeout_s)
        self.notices.close()

    def save_and_stop(self, request: SaveRequest) -> None:
        """Save the step because of a notice, within what is left of the grace period. A second call does nothing."""
        if self.stopped:
            return
        self._hear_of_stop()
        self._progress.set_phase(ReportPhase.SAVING)
        with bearing_ends_of_children():
            if self.process_exit.saves_before_stop:
                self.stop_save.start(request, self.grace.left_s())
            else:
                self._await_stops(request.step)
            self.await_stop_save()

    def stop_at_last_step(self, *, saves: bool) -> None:
        """Save the last finished step as one that all stop at, if `saves`, and wait for the saves in flight."""
        request = self.unsaved_step
        self._hear_of_stop()
        if saves and request is not None:
            self._progress.set_phase(ReportPhase.SAVING)
            self.stop_save.start(request, self.grace.left_s())
        self.await_stop_save()

    def await_stop_save(self) -> None:
        """Wait for the save that all stop with, within what is left of the grace period. The training has stopped."""
        self.stop_save.wait(self.grace.left_s())
        self.stopped = True

    def _await_stops(self, step: int) -> None:
        """Wait for the other ranks at the step that all stop at; if one doesn't come, this one stops all the same."""
        try:
            self.decider.await_stops(self.grace.bound_s(_STOPS_S))
        except (PeerLostError, NoticeDeadlineError) as error:
            _log.warning(
                "not all ranks came to step %d, at which they stop: %s", step, error, extra={"step": step}
            )

    def stop_unsaved(self, step: int, error: NoticeDeadlineError) -> None:
        """Stop at `step` without a save: the time of a notice was over while the training waited."""
        _log.error("step %d is not saved for the notice: %s", step, error, extra={"step": step})
        self._hear_of_stop()
        self._saver.forgive_failure(f"step {step} is not saved for the notice: {error}")
        self.stopped = True

    def follow_directive(self, directive: Directive) -> None:
        """Start what the operator asks for. Runs in the thread that listens to the companion."""
        if directive.stop:
            self.notices.record_notice("directive", kills=False)
        if directive.checkpoint_now is not None and self.decider.request_save(directive.checkpoint_now):
            _tell_request(directive)

    def _read_conditions(self) -> SaveConditions:
        """Return the state of the saves, by which rank 0's policy decides."""
        claimed = self._companion.claimed_root
        past = None if claimed is None else claimed.past
        return SaveConditions(
            saving=self._saver.in_flight is not None,
            cost=self._saver.cost,
            disruptions=Disruptions()
            if claimed is None or past is None
            else self._disruption_history.count_until_now(claimed.claim.slot, past),
        )

    def _read_save_s(self) -> float | None:
        cost = self._saver.cost
        return None if cost is None else cost.duration_s

    def _on_tick(self) -> None:
        """Send the latest step, and do what it is time for. Runs five times a second.

        That is a save before a maintenance, and the end of a call that a notice's time is over for.
        """
        if self.decider.stop_is_agreed:
            # This rank hasn't come to that step yet, and may be waiting for something that the notice must end.
            self._hear_of_stop()
        self._announcements.check()
        stuck_since_s = self._waits.stuck_since_s
        if stuck_since_s is not None and self.grace.is_overdue(stuck_since_s):
            self._end_stuck()
        self._progress.send_latest_step()

    def _end_stuck(self) -> None:
        """End the process where it is stuck, with the code of the fence or the loss that it knows of, if any."""
        why = self._saver.failures.fence or self._waits.loss
        code = ExitCode.SAVED if why is None else process_exit_code(why)
        self.process_exit.end_stuck(code, lambda: self._write_word(code, None if why is None else str(why)))

    def _on_notice(self, notice: Notice) -> None:
        """Request the stop of all ranks. Runs in the thread where the notice came up."""
        self.decider.request_stop(asked=not notice.kills)
        # Should the process be killed before it has stopped, this says why.
        self._write_word(ExitCode.SAVED)
        self._progress.record_notice(notice.source)
        tell_briefly(lambda: _log.warning("notice (%s): all ranks save one step and stop", notice.source))

    def _hear_of_stop(self) -> None:
        """Note that all ranks stop. A process may be killed for it, and take its part in the save with it."""
        told, kills = self.notices.notices, self.decider.kills
        if kills is None:
            kills = not told or any(notice.kills for notice in told)
        self.notices.record_notice("peer", kills=kills)

    def _hear_early_stop(self) -> None:
        """Note that another rank was told to stop before all had come to the training."""
        self.notices.record_notice("peer")

    def _write_word(self, code: int, error: str | None = None) -> None:
        """Write how the process ends if nobody knows better."""
        self.process_exit.write_termination_message(
            code,
            committed=self._saver.lineage.own_commit,
            restored=self._saver.lineage.restored_commit,
            error=error,
            is_final=False,
        )


def _tell_request(directive: Directive) -> None:
    left_s = directive.save_within_s
    left = "" if left_s is None else f" within {left_s} s"
    why = "" if directive.save_reason is None else f": {directive.save_reason}"
    _log.warning("the operator asks for a save%s%s", left, why)
