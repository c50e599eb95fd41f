"""Make the moves of a rank's `Ending` in the train thread: wait, choose with the other ranks, and save.

A loss is the reason, as text, that the last step isn't saved. The program's hooks are called with each save's report.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Final, TypeAlias

from stepkeeper.contract import ExitCode, ReportPhase
from stepkeeper.ending.choices import (
    EndChoice,
    LastStepOfRank,
    NewestSave,
    StopChoice,
    choose_end,
    choose_stop_save,
)
from stepkeeper.ending.machine import Ending, Move
from stepkeeper.ending.notices import Notices
from stepkeeper.ending.parts import EndingParts
from stepkeeper.errors import (
    FencedError,
    NoticeDeadlineError,
    PeerLostError,
    SaveError,
    StepkeeperError,
    StorageError,
)
from stepkeeper.loggers import logger
from stepkeeper.save.given_state import SaveRequest
from stepkeeper.save.in_flight import InFlight
from stepkeeper_planners.errors import PlannerError

__all__ = ["Moves"]

Change: TypeAlias = Callable[[Ending], Ending]

_log: Final = logger("stepkeeper")
_STOPS_S: Final = 60.0
"""Seconds by which ranks may reach the stop step apart, unless the grace period is shorter."""

_END_S: Final = 10.0
"""Seconds by which ranks may end apart whose programs end themselves because of a notice."""

_HOOKS_S: Final = 60.0
_FINAL: Final = (PeerLostError, NoticeDeadlineError, TimeoutError, PlannerError)
"""Failures of a save that a retry can't avoid."""


class Moves:
    """Make moves, one at a time. Each method for a move returns the change that the move makes to the `Ending`."""

    def __init__(self, parts: EndingParts, notices: Notices) -> None:
        self._steps, self._saver, self._rank_group = parts.steps, parts.saver, parts.rank_group
        self._notices, self._progress = notices, parts.progress
        self.stop_request: SaveRequest | None = None
        """The stop step, with its state."""

    def make(self, ending: Ending) -> Change:
        """Make the next move of `ending`, which all ranks make together, and return its change.

        Raises FencedError, NoticeDeadlineError, PeerLostError, and StepkeeperError if a save failed.
        """
        match ending.move:
            case Move.MEET:
                return self._meet()
            case Move.SAVE_STOP:
                return self._save_stop(ending)
            case Move.AGREE:
                return self._agree_to_stop(ending) if ending.ends_itself else self._agree_when_idle(ending)
            case _:  # SAVE_LAST
                return self._save_last()

    def settle(self, error: BaseException | None) -> None:
        """Wait for the saves in flight as long as a notice allows, or a short time if `error` ends the process."""
        alone = self._rank_group.world_size == 1
        limit_s = None if error is None else self._notices.schedule.save_timeout_s(alone=alone)
        with suppress(StepkeeperError):
            self._saver.wait_until_idle(limit_s)

    def _find_unsaved_step(self) -> SaveRequest | None:
        """Return the last finished step if it isn't saved."""
        request = self._steps.last_step.request
        if request is None or self._steps.has_saved(request.step):
            return None
        return replace(request, is_last=True)

    def _meet(self) -> Change:
        try:
            self._steps.decider.agreement.await_stops(self._notices.schedule.bound_s(_STOPS_S))
        except (PeerLostError, NoticeDeadlineError) as error:
            _log.warning("not all ranks reached the stop step: %s", error)
        return lambda ending: ending.on_ranks_met()

    def _save_stop(self, ending: Ending) -> Change:
        """Save the stop step if all ranks choose to, and wait until the newest save has ended."""
        self._progress.set_phase(ReportPhase.SAVING)
        request = self.stop_request if ending.has_state else None
        choice, loss = StopChoice(False), ending.loss
        failure: Exception | None = None
        if request is not None:
            choice, loss = self._choose(request.step, ending)
        if request is not None and choice.starts:
            try:
                self._saver.start_save(request, self._notices.schedule.left_s)
            except (StorageError, SaveError, TimeoutError) as error:
                failure, loss = error, f"step {request.step} is not saved for the notice: {error}"
                _log.error("%s", loss, extra={"step": request.step})
        # Without a retry there is nothing to wait for after the first try: its failure is known.
        if (choice.starts or ending.n_tries == 0) and (late := self._await_newest()) is not None:
            failure, loss = late, f"the newest save before the stop failed: {late!r}"
        # The process stops with code 75 also after a failure, which would otherwise be raised later.
        if self._saver.newest_save is not None or loss is not None:
            self._saver.forgive_failure(loss)
        may_retry = failure is not None and not isinstance(failure, _FINAL)
        return lambda ending: ending.on_save_finished(loss, may_retry=may_retry, choice=choice.why)

    def _choose(self, step: int, ending: Ending) -> tuple[StopChoice, str | None]:
        """Choose with all ranks whether to save `step`, and return the choice and the loss so far.

        Each rank may see another newest save, and a save that only some ranks start would wait for the others.
        """
        left_s = self._notices.schedule.left_s
        own = asdict(_describe(self._saver.newest_save, step, left_s))
        limit_s = self._rank_group.limits.apart_s if left_s is None else left_s

        def judge(by_rank: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
            cost = self._saver.cost
            cost_s = None if cost is None else cost.duration_s
            newest = [NewestSave(**each) for each in by_rank]
            return choose_stop_save(newest, cost_s, again=ending.n_tries > 0)._asdict()

        try:
            choice = StopChoice(**self._exchange(f"stop/save/{ending.n_tries}", own, judge, limit_s))
        except PeerLostError as error:
            loss = ending.loss or f"the ranks could not agree whether to save step {step}: {error}"
            _log.error("%s", loss, extra={"step": step})
            return StopChoice(False), loss
        if choice.why is not None:
            choice = choice._replace(why=f"at step {step}, {choice.why}")
            _log.warning("stopping %s", choice.why, extra={"step": step})
        return choice, None if choice.starts else ending.loss

    def _await_newest(self) -> Exception | None:
        """Wait until the newest save has ended, and return its failure. Raises FencedError."""
        last = self._saver.newest_save
        if last is None:
            return None
        try:
            last.result(self._notices.schedule.left_s)
        except FencedError:
            raise
        except (StepkeeperError, PlannerError, TimeoutError) as error:
            _log.exception("the save for the notice failed", extra={"step": last.step})
            return error
        return None

    def _agree_when_idle(self, ending: Ending) -> Change:
        """Agree with all ranks on the end, once no save is in flight."""
        self._saver.wait_until_idle()
        self._await_hooks()
        self._saver.failures.raise_failure(newest=True)
        if self._saver.failures.fence is not None:
            return lambda ending: ending.close_with(ExitCode.FENCED)
        self._saver.await_upkeep()
        return self._agree(ending)

    def _await_hooks(self) -> None:
        # Hooks may still call the manager.
        self._saver.await_hooks(self._notices.schedule.bound_s(_HOOKS_S))

    def _agree_to_stop(self, ending: Ending) -> Change:
        """Agree on the end of a program that ended itself. If others don't end, nothing can be saved."""
        try:
            return self._agree(ending)
        except (PeerLostError, NoticeDeadlineError) as error:
            loss = f"the last step is not saved: not all ranks ended with this one: {error}"
            _log.warning("%s", loss)
            return lambda ending: ending.on_end_agreed(saves=False, stops=True, loss=loss)

    def _agree(self, ending: Ending) -> Change:
        """Agree with all ranks whether to save the last step, and whether training is done or stops."""
        skips = not ending.saves_at_stop and self._notices.first is not None
        last, stops = None if skips else self._find_unsaved_step(), ending.ends_itself
        step = None if last is None else last.step
        # A restore that failed halfway has left parts of another step in the state.
        is_mixed = self._saver.mixed_state.is_mixed
        changed = is_mixed or self._steps.last_step.has_changed
        own = asdict(LastStepOfRank(step=step, changed=changed, stops=stops))

        def judge(by_rank: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
            return choose_end([LastStepOfRank(**each) for each in by_rank])._asdict()

        limit_s = self._notices.schedule.bound_s(_END_S) if stops else self._rank_group.limits.apart_s
        end = EndChoice(**self._exchange("done", own, judge, limit_s))
        if end.loss is not None and is_mixed:
            loss = f"step {step}, the last one, isn't saved: a restore has failed half-way since"
            end = end._replace(loss=loss)
        if end.loss is not None and self._rank_group.rank == 0:
            _log.warning("%s", end.loss)
        if end.stops:
            self.stop_request = last if end.saves else None
        return lambda ending: ending.on_end_agreed(saves=end.saves, stops=end.stops, loss=end.loss)

    def _save_last(self) -> Change:
        request = self._find_unsaved_step()
        assert request is not None
        self._progress.set_phase(ReportPhase.SAVING)
        try:
            self._saver.await_commit(self._steps.start_save(request))
        except StepkeeperError:
            raise
        except Exception as error:
            raise SaveError(f"saving step {request.step}, the last one, failed: {error}") from error
        self._await_hooks()
        self._saver.await_upkeep()
        # The commit needs all ranks, so none may leave before.
        self._exchange("saved", {}, lambda _: {}, self._rank_group.limits.apart_s)
        return lambda ending: ending.close_with(ExitCode.DONE)

    def _exchange(
        self,
        name: str,
        own: Mapping[str, Any],
        judge: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]],
        limit_s: float,
    ) -> dict[str, Any]:
        """Wait for all ranks, and return rank 0's conclusion from their values. Raises PeerLostError."""
        by_rank = self._rank_group.gather(name, dict(own), limit_s)
        return self._rank_group.broadcast(f"all/{name}", judge(by_rank) if by_rank else None, 2 * limit_s)


def _describe(last: InFlight | None, step: int, left_s: float | None) -> NewestSave:
    if last is None:
        return NewestSave(left_s=left_s)
    return NewestSave(
        is_of_stop=last.step == step,
        failed=last.failed,
        in_flight_s=None if last.done else last.duration_millis() / 1000,
        left_s=left_s,
    )
