"""End one manager and its process, in the train thread: stop at a step, close, or leave the manager's `with` block.

Each move of the rank's `Ending` has a method here. A loss is the reason, as text, that the last step isn't saved. A
fence is the error that another claim owns the root. The program's hooks are called with each save's report.
"""

import sys
from contextlib import suppress
from dataclasses import replace
from typing import Final

from stepkeeper.contract import ExitCode, ReportPhase
from stepkeeper.ending.data_loaders import interrupts_a_step, is_end_of_workers, tolerate_worker_exits
from stepkeeper.ending.exits import exit_code_of, find_end, has_own_code
from stepkeeper.ending.machine import EndChoice, Ending, Move, choose_end
from stepkeeper.ending.schedule import END_WAIT_S, ENDS_APART_S, LOSS_KNOWN_S
from stepkeeper.ending.watch import EndingParts, EndWatch
from stepkeeper.errors import (
    ClosedError,
    FencedError,
    NoticeDeadlineError,
    PeerLostError,
    SaveError,
    StepkeeperError,
    StorageError,
)
from stepkeeper.loggers import logger
from stepkeeper.save.given_state import SaveRequest
from stepkeeper_planners.errors import PlannerError

__all__ = ["EndingShell"]

_log: Final = logger("stepkeeper")
_FINAL: Final = (PeerLostError, TimeoutError, PlannerError)
"""Failures of a save that a retry can't avoid."""


class EndingShell:
    """Carry out the end of a manager. The train thread calls the methods, except where noted."""

    def __init__(self, parts: EndingParts) -> None:
        """Store the parts; nothing is watched before `start`."""
        self._parts, self._watch = parts, EndWatch(parts)
        self._saver, self._rank_group = parts.saver, parts.rank_group
        self.start: Final = self._watch.start
        self.notices: Final = self._watch.notices
        self.saves_on_notice: Final = parts.saves_on_notice
        self._last_request: SaveRequest | None = None
        """The stop step, or the training's last one, with its state; None if there is nothing to save."""

        self._error: BaseException | None = None
        """The exception that ends the process."""

        self._has_warned = False

    @property
    def is_closed(self) -> bool:
        """True if the manager is closed, or belongs to the parent of this forked process."""
        return self._watch.ending.is_closed

    def check_open(self) -> None:
        """Check that the manager isn't closed. Raises ClosedError."""
        if self.is_closed:
            raise ClosedError(
                "this manager is closed, or belongs to the parent of this forked process; construct another one"
            )

    def raise_failure(self, *, newest: bool = False) -> None:
        """Raise the error of a background save that failed since the last call; see `SaveFailures`."""
        self.check_open()
        self._saver.failures.raise_failure(newest=newest)

    def should_stop_at(self, step: int) -> bool:
        """Return True from the agreed stop step on. All ranks call this after each step that is finished or saved.

        They agree on requests here even if the caller doesn't stop.
        """
        self.start()
        if not self._parts.steps.decider.should_stop_at(step):
            return False
        ending = self._watch.ending = self._watch.ending.reach(step)
        trains_on = ending.stop_step is not None and step > ending.stop_step and not ending.has_stopped
        if trains_on and not self._has_warned:
            self._has_warned = True
            text = "step %d comes after the stop at step %d: call `step` after every step and obey its `stop`"
            _log.warning(text, step, ending.stop_step, extra={"step": step})
        return True

    def stop_at(self, request: SaveRequest) -> None:
        """Save the stop step, or wait for all ranks there. A second call does nothing."""
        if not self._watch.ending.has_stopped:
            self._last_request = replace(request, is_last=True)
            with tolerate_worker_exits():
                self._run(self._watch.ending.stop())

    def stop_unsaved(self, step: int, error: NoticeDeadlineError) -> None:
        """Stop at `step` without a save: a notice's deadline came while the training waited."""
        self._watch.on_stop_agreed()
        self._watch.ending = self._finish_stop(self._watch.ending, _not_saved(step), error)

    def close(self) -> None:
        """Finish the training on all ranks: commit saves in flight and the last finished step, and report.

        If the caller already got a fence, the manager is closed with the fence's code. Raises StepkeeperError if a save
        failed, PeerLostError, and SystemExit if the process, or another rank, stops because of a notice.
        """
        if not self.is_closed:
            self._run(self._watch.ending.leave(respects_stop=False))

    def leave_block(self, error: BaseException | None) -> None:
        """End the manager, and the process if needed, when its block is left, with `error` if not None.

        Raises SystemExit if the process stops after a notice, in time or not, another claim owns the root, or
        a rank is lost; StepkeeperError if a save failed.
        """
        if self.is_closed:
            return None
        failure = error
        # A signal to all processes ends the data workers too, which raises an error in the training.
        follows_notice = is_end_of_workers(error) and self.notices.read_first() is not None
        if error is None or exit_code_of(error) == ExitCode.DONE or follows_notice:
            try:
                with tolerate_worker_exits():
                    return self._leave_in_order(error)
            except Exception as late:  # such as a failed save, or the loss of a rank or the root
                failure = late
        assert failure is not None
        failure = self._end_with(find_end(failure))
        if has_own_code(failure):
            # The interpreter shows nothing for SystemExit.
            sys.excepthook(type(failure), failure, failure.__traceback__)
            raise SystemExit(exit_code_of(failure)) from failure
        if failure is not error:
            raise failure
        return None

    def _leave_in_order(self, chosen: BaseException | None) -> None:
        """Leave the block after a stop, or at the training's end.

        `chosen` is the exception that left the block, if any: an exit with code 0, or an error that followed a notice.
        After a notice, the program has thereby ended itself, as Lightning's does.
        """
        ends_itself = chosen is not None and self.notices.read_first() is not None
        if chosen is not None and ends_itself and interrupts_a_step(chosen):
            # The state belongs to no step, so it can't be saved as the last one's.
            self._parts.steps.last_step.forget()
        self._run(self._watch.ending.leave(ends_itself=ends_itself, respects_stop=self.saves_on_notice))
        if (fence := self._saver.failures.fence) is not None:
            raise FencedError(str(fence))

    def _end_with(self, error: BaseException) -> BaseException:
        """Close the manager because of `error`. Return the error that ends the process.

        That is `error`, a fence, or the loss of another rank, which explains `error`.
        """
        # A collective of the training fails when another rank dies, before that rank is known to be lost.
        if self._rank_group.world_size > 1 and not has_own_code(error):
            error = self._parts.waits.explain(error, self.notices.schedule.bound_s(LOSS_KNOWN_S))
        self._error = error
        self._run(self._watch.ending.close_with(exit_code_of(error)))
        return self._error

    def _run(self, ending: Ending) -> None:
        """Make the moves that follow from `ending`. Raises their errors, and SystemExit once a stop has been closed."""
        if self.is_closed:
            return
        self._watch.ending = ending
        try:
            while self._watch.ending.move is not None:
                self._watch.ending = self._make(self._watch.ending)
        except BaseException:
            self._watch.ending = self._watch.ending.return_to_program()
            raise
        if self.is_closed and self._error is None and self._watch.ending.code == ExitCode.SAVED:
            sys.exit(ExitCode.SAVED)

    def _make(self, ending: Ending) -> Ending:
        """Make the next move of `ending`, and return what follows.

        Raises FencedError, NoticeDeadlineError, PeerLostError, and StepkeeperError if a save failed.
        """
        match ending.move:
            case Move.MEET | Move.SAVE_STOP:
                self._watch.on_stop_agreed()
                self._parts.progress.set_phase(ReportPhase.SAVING)
                return self._meet(ending) if ending.move is Move.MEET else self._save_stop(ending)
            case Move.AGREE:
                return self._agree(ending)
            case Move.SAVE_LAST:
                return self._save_last(ending)
            case _:
                return self._close(ending)

    def _meet(self, ending: Ending) -> Ending:
        """Wait until all ranks have reached the stop step, and for the newest save."""
        try:
            self._parts.steps.decider.agreement.await_stops(self.notices.schedule.bound_s(END_WAIT_S))
        except (PeerLostError, NoticeDeadlineError) as error:
            _log.warning("not all ranks reached the stop step: %s", error)
        return self._finish_stop(ending, "the newest save before the stop failed", self._await_newest())

    def _save_stop(self, ending: Ending) -> Ending:
        """Save the stop step unless it is committed, after the saves in flight, which get all the bandwidth.

        Each rank decides by itself: a save that not all ranks start fails, or finds the other ranks gone.
        """
        request = self._last_request
        assert request is not None
        failure, newest = self._await_newest(), self._saver.newest_save
        if failure is not None or newest is None or newest.step != request.step:
            try:
                if (left_s := self.notices.schedule.left_s) == 0.0:
                    raise TimeoutError("no time is left")
                self._saver.start_save(request, left_s)
                failure = self._await_newest()
            except (StorageError, SaveError, TimeoutError, PeerLostError) as error:
                failure = error
        return self._finish_stop(ending, _not_saved(request.step), failure)

    def _await_newest(self) -> Exception | None:
        """Wait until the newest save has ended, and return its failure. Raises FencedError."""
        if (newest := self._saver.newest_save) is not None:
            try:
                newest.result(self.notices.schedule.left_s)
            except FencedError:
                raise
            except (StepkeeperError, PlannerError, TimeoutError) as error:
                return error
        return None

    def _finish_stop(self, ending: Ending, what: str, failure: Exception | None) -> Ending:
        """Return what follows a try to stop. `what` isn't saved because of `failure`, if there is one."""
        loss = None if failure is None else f"{what}: {failure}"
        may_retry = failure is not None and not isinstance(failure, _FINAL)
        if loss is not None:
            _log.error("%s", loss, exc_info=failure if may_retry else None)
        after = ending.on_stop_tried(loss, may_retry=may_retry)
        # The process stops with code 75 also after a failure, which would otherwise be raised later.
        self._saver.forgive_failure(after.loss)
        return after

    def _agree(self, ending: Ending) -> Ending:
        """Agree with all ranks on the end. A program that ended itself can't wait for long for those that don't end."""
        if ending.code is not None:
            try:
                return self._choose_end(ending, self.notices.schedule.bound_s(ENDS_APART_S))
            except (PeerLostError, NoticeDeadlineError) as error:
                return self._finish_stop(ending, "the last step is not saved: not all ranks end here", error)
        self._saver.wait_until_idle()
        self._await_hooks()
        if compares := self._saver.next_save_compares:
            self._parts.steps.last_step.take_back()
        self._saver.failures.raise_failure(newest=not (compares or self._saver.failures.may_retry))
        if self._saver.failures.fence is not None:
            return ending.close_with(ExitCode.FENCED)
        self._saver.await_upkeep()
        after = self._choose_end(ending, self._rank_group.limits.apart_s)
        if after.move is Move.CLOSE:
            self._saver.failures.raise_failure(newest=True)
        return after

    def _await_hooks(self) -> None:
        # Hooks may still call the manager.
        self._saver.await_hooks(self.notices.schedule.bound_s(END_WAIT_S))

    def _choose_end(self, ending: Ending, limit_s: float) -> Ending:
        """Choose with all ranks whether to save the last step, and whether training is done or stops."""
        steps, last, loss = self._parts.steps, self._parts.steps.last_step.request, None
        skips = not ending.saves_at_stop and self.notices.first is not None
        if last is not None:
            is_saved = steps.has_saved(last.step) and not self._saver.next_save_compares
            last = None if skips or is_saved else replace(last, is_last=True)
        # A restore that failed halfway has left parts of another step in the state.
        if last is not None and (self._saver.mixed_state.is_mixed or steps.last_step.has_changed):
            loss = (
                f"step {last.step}, the last one, is not saved: the state has changed since. Call step() after the "
                "last change of each step, or save the last step when it is finished (total_steps=)"
            )
        own = EndChoice(step=None if last is None else last.step, stops=ending.code is not None, loss=loss)
        choice = self._choose("done", own, limit_s)
        if choice.loss is not None and self._rank_group.rank == 0:
            _log.warning("%s", choice.loss)
        self._last_request = last
        return ending.on_end_agreed(choice)

    def _save_last(self, ending: Ending) -> Ending:
        """Save the last step on all ranks. Their commit needs this one, so none may leave before."""
        assert self._last_request is not None
        self._parts.progress.set_phase(ReportPhase.SAVING)
        self._saver.await_commit(self._parts.steps.start_save(self._last_request))
        self._await_hooks()
        self._saver.await_upkeep()
        self._choose("saved", EndChoice(step=None, stops=False), self._rank_group.limits.apart_s)
        return ending.close_with(ExitCode.DONE)

    def _choose(self, name: str, own: EndChoice, limit_s: float) -> EndChoice:
        """Wait for all ranks, and return the choice that rank 0 makes from theirs. Raises PeerLostError."""
        by_rank = self._rank_group.gather(name, own._asdict(), limit_s)
        joined = choose_end([EndChoice(**each) for each in by_rank])._asdict() if by_rank else None
        return EndChoice(**self._rank_group.broadcast(f"all/{name}", joined, 2 * limit_s))

    def _close(self, ending: Ending) -> Ending:
        """Close all parts, once the saves in flight have ended, after an error in a short time. A fence comes first."""
        error, limit_s = self._error, None
        if error is not None:
            is_alone = self._rank_group.world_size == 1
            limit_s = self.notices.schedule.bound_s(END_WAIT_S if is_alone else ENDS_APART_S)
        if not isinstance(error, PeerLostError):
            with suppress(StepkeeperError):
                self._saver.wait_until_idle(limit_s)
        code, fence = ending.code, self._saver.failures.fence
        if fence is not None and not isinstance(error, FencedError):
            fence = FencedError(str(fence))
            fence.__cause__ = error
            if error is not None:
                self._error = fence
            elif code == ExitCode.SAVED:
                raise fence
            code, error = ExitCode.FENCED, fence
        assert code is not None
        # With such a code the process exits after this. Otherwise the program may catch the error and continue.
        exits = code == ExitCode.SAVED if self._error is None else has_own_code(self._error)
        self._watch.close(code, error, exits=exits)
        return self._watch.ending


def _not_saved(step: int) -> str:
    return f"step {step} is not saved for the notice"
