"""End one manager and its process, in the train thread: stop at a step, close, or leave the manager's `with` block.

A fence is the error that another claim owns the root. An error has its own exit code if that isn't Python's 1.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from stepkeeper.contract import Directive, ExitCode, NoticeSource, ReportPhase
from stepkeeper.ending.data_loaders import interrupts_a_step, is_end_of_workers, tolerate_worker_exits
from stepkeeper.ending.exits import ending_in_time, exit_code_of, find_end, format_traceback, has_own_code
from stepkeeper.ending.fence import show_exception
from stepkeeper.ending.machine import Ending, Move
from stepkeeper.ending.moves import Moves
from stepkeeper.ending.notices import Notices
from stepkeeper.ending.parts import EndingParts
from stepkeeper.ending.watch import EndWatch
from stepkeeper.errors import ClosedError, FencedError, NoticeDeadlineError, StepkeeperError
from stepkeeper.loggers import logger
from stepkeeper.save.given_state import SaveRequest

__all__ = ["EndingShell"]

_log: Final = logger("stepkeeper")
_LEAVE_S: Final = 1.0
"""Seconds for announcing to the other ranks that this rank leaves."""

_READ_S: Final = 5.0
"""Seconds for the other ranks to read rank 0's last broadcast."""

_STUCK_S: Final = 2.0
"""Seconds that a save has to end once it has nothing left to wait for."""

_NOTICED_S: Final = 1.0
"""Seconds in which the loss of a rank becomes known after a collective failed because of it."""


class EndingShell:
    """Carry out the end of a manager. The train thread calls the methods, except where noted."""

    def __init__(self, parts: EndingParts) -> None:
        """Store the parts; nothing is watched before `start`."""
        self._parts = parts
        self._watch = EndWatch(parts)
        self._moves = Moves(parts, self._watch.notices)
        self._error: BaseException | None = None
        """The exception that ends the process."""

        self._has_warned = False
        self.notices: Final[Notices] = self._watch.notices
        self.saves_on_notice: Final = parts.saves_on_notice

    @property
    def is_closed(self) -> bool:
        """True if the manager is closed, or belongs to the parent of this forked process."""
        return self._watch.ending.is_closed

    def start(self) -> None:
        """Start to watch for notices; see `EndWatch.start`."""
        self._watch.start()

    @contextmanager
    def in_call(self) -> Iterator[None]:
        """Register that the training waits in a manager's call, and remember a fence that the call raises.

        The call's waits end at a notice's deadline. If it is stuck anyway, the process is ended before the kill.
        """
        try:
            with self._parts.waits.in_call():
                yield
        except FencedError as error:
            self._parts.saver.failures.record_fence(error)
            raise

    def check_open(self) -> None:
        """Check that the manager isn't closed. Raises ClosedError."""
        if self.is_closed:
            raise ClosedError(
                "this manager is closed, or belongs to the parent of this forked process; construct another one"
            )

    def raise_failure(self, *, newest: bool = False) -> None:
        """Raise the error of a background save that failed since the last call; see `SaveFailures`."""
        self.check_open()
        self._parts.saver.failures.raise_failure(newest=newest)

    def should_stop_at(self, step: int) -> bool:
        """Return True from the agreed stop step on. All ranks call this after each step.

        They agree on requests here even if the caller doesn't stop.
        """
        self.start()
        if not self._parts.steps.decider.should_stop_at(step):
            return False
        self._watch.become(lambda ending: ending.reach(step))
        return True

    def stop_at(self, request: SaveRequest) -> None:
        """Save the stop step, or wait for all ranks there. A second call does nothing."""
        if not self._watch.ending.has_stopped:
            self._moves.stop_request = replace(request, is_last=True)
            with tolerate_worker_exits():
                self._run(lambda ending: ending.stop())

    def warn_of_stop(self, step: int) -> None:
        """Warn once if a program saves `step`, but trains beyond the stop step."""
        ending = self._watch.ending
        if self._has_warned or ending.has_stopped or ending.stop_step is None or step <= ending.stop_step:
            return
        self._has_warned = True
        text = "step %d is saved, but all ranks stop at step %d: call `step` after every step and obey its `stop`"
        _log.warning(text, step, ending.stop_step, extra={"step": step})

    def stop_unsaved(self, step: int, error: NoticeDeadlineError) -> None:
        """Stop at `step` without a save: a notice's deadline came while the training waited."""
        loss = f"step {step} is not saved for the notice: {error}"
        _log.error("%s", loss, extra={"step": step})
        self._watch.on_stop_agreed()
        self._parts.saver.forgive_failure(loss)
        self._watch.become(lambda ending: ending.miss_deadline(loss))

    def close(self) -> None:
        """Finish the training on all ranks: commit saves in flight and the last finished step, and report.

        If the caller already got a fence, the manager is closed with the fence's code. Raises StepkeeperError if a save
        failed, PeerLostError, and SystemExit if the process, or another rank, stops because of a notice.
        """
        if not self.is_closed:
            self._run(lambda ending: ending.leave(respects_stop=False))
            self._exit_if_saved()

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
            except StepkeeperError as late:  # such as a failed save, or the loss of a rank or the root
                failure = late
        assert failure is not None
        failure = self._end_with(find_end(failure))
        if has_own_code(failure):
            # The interpreter shows nothing for SystemExit.
            show_exception(failure)
            raise SystemExit(exit_code_of(failure)) from failure
        if failure is not error:
            raise failure
        return None

    def follow_directive(self, directive: Directive) -> None:
        """Follow the operator's directive. Runs in the thread that listens to the companion."""
        if directive.stop:
            self.notices.record(NoticeSource.DIRECTIVE, kills=False)
        self._parts.steps.follow_save_request(directive)

    def _leave_in_order(self, chosen: BaseException | None) -> None:
        """Leave the block after a stop, or at the training's end.

        `chosen` is the exception that left the block, if any: an exit with code 0, or an error that followed a notice.
        After a notice, the program has thereby ended itself, as Lightning's does.
        """
        self._raise_fence()
        ending, respects_stop = self._watch.ending, self.saves_on_notice
        stops = ending.has_stopped or (respects_stop and ending.stop_step is not None)
        ends_itself = chosen is not None and not stops and self.notices.read_first() is not None
        if chosen is not None and ends_itself and interrupts_a_step(chosen):
            # The state belongs to no step, so it can't be saved as the last one's.
            self._parts.steps.last_step.forget()
        self._run(lambda ending: ending.leave(ends_itself=ends_itself, respects_stop=respects_stop))
        self._exit_if_saved()
        self._raise_fence()

    def _raise_fence(self) -> None:
        """Raise the fence if one is known: another start trains, so this one must not end as if it were done."""
        if (fence := self._parts.saver.failures.fence) is not None:
            raise FencedError(str(fence))

    def _exit_if_saved(self) -> None:
        if self._watch.ending.code == ExitCode.SAVED:
            sys.exit(ExitCode.SAVED)

    def _end_with(self, error: BaseException) -> BaseException:
        """Close the manager because of `error`. Return the error that ends the process.

        That is `error`, a fence, or the loss of another rank, which explains `error`.
        """
        # A collective of the training fails when another rank dies, before that rank is known to be lost.
        if self._parts.rank_group.world_size > 1 and not has_own_code(error):
            error = self._parts.waits.explain(error, self.notices.schedule.bound_s(_NOTICED_S))
        self._error = failure = self._fenced(error)
        self._run(lambda ending: ending.fail(failure))
        return self._error

    def _fenced(self, error: BaseException) -> BaseException:
        """Return `error`, or the fence if one is known, because another start trains then."""
        fence = self._parts.saver.failures.fence
        if fence is None or isinstance(error, FencedError):
            return error
        fenced = FencedError(str(fence))
        fenced.__cause__ = error
        return fenced

    def _run(self, change: Callable[[Ending], Ending]) -> None:
        """Apply a change, and make the moves that follow from it. Raises their errors."""
        if self.is_closed:
            return
        self._watch.become(change)
        try:
            while self._watch.ending.move is not None:
                match self._watch.ending.move:
                    case Move.SETTLE:
                        self._settle()
                    case Move.CLOSE:
                        self._close()
                    case move:
                        if move in {Move.MEET, Move.SAVE_STOP}:
                            self._watch.on_stop_agreed()
                        self._watch.become(self._moves.make(self._watch.ending))
        except BaseException:
            self._watch.become(lambda ending: ending.return_to_program())
            raise

    def _settle(self) -> None:
        """Wait for saves in flight, after an error a short time only. They may find that the root is lost."""
        self._moves.settle(self._error)
        if self._error is None:
            self._watch.become(lambda ending: ending.end_stop())
        else:
            self._error = error = self._fenced(self._error)
            self._watch.become(lambda ending: ending.close_with(exit_code_of(error)))

    def _close(self) -> None:
        """Write the termination message, send the last report, and close all parts."""
        code, error, fence = self._watch.ending.code, self._error, self._parts.saver.failures.fence
        assert code is not None
        if error is None and code == ExitCode.SAVED:
            # The save for the notice may have found a fence, which has another exit code.
            self._raise_fence()
        if code == ExitCode.DONE and error is None:
            self._parts.progress.set_phase(ReportPhase.DONE)
        text = None if error is None else format_traceback(error)
        if text is not None:
            self._parts.progress.set_error(text)
        elif code == ExitCode.FENCED and fence is not None:
            text, error = str(fence), fence
        # A failure would end the other ranks' waits. After a missed deadline their save may still be committed.
        failure = None if isinstance(error, NoticeDeadlineError) else error
        # With such a code the process exits after this. Otherwise the program may catch the error and continue.
        exits_now = code == ExitCode.SAVED if self._error is None else has_own_code(self._error)
        if exits_now:
            self.notices.keep_exit_code(code)
        schedule = self.notices.schedule
        ends_s = time.monotonic() + schedule.closing_timeout_s

        def lasts() -> bool:
            return exits_now and self.notices.schedule.is_killed_at_known_time

        with ending_in_time(schedule.end_left_s, code, lasts=lasts):
            self._watch.become(lambda ending: ending.on_closed())
            self._watch.write_message(code, text or self._parts.saver.error, failure=failure)
            self._close_parts(code, failure, ends_s)

    def _close_parts(self, code: int, failure: BaseException | None, ends_s: float) -> None:
        """Close all parts by `ends_s`. Each gets a share of the time that is left.

        The other ranks come first: they may be waiting for this one or its error.
        """

        def share_s(part: float, most_s: float = math.inf) -> float:
            return min(most_s, part * max(0.0, ends_s - time.monotonic()))

        parts = self._parts
        parts.rank_group.announce_leave(failure, share_s(1 / 4, _LEAVE_S))
        parts.rank_group.abort()
        self._watch.close(share_s(1 / 3))
        parts.progress.send_latest_step()
        parts.companion.close(share_s(7 / 8))
        parts.saver.close(share_s(1, _STUCK_S))
        # A lost rank reads no broadcast. A training that is done has awaited its hooks already.
        if code != ExitCode.PEER_LOST:
            parts.rank_group.leave(share_s(1, _READ_S))
        if code != ExitCode.DONE:
            parts.saver.await_hooks(share_s(1))
