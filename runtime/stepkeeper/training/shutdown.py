"""End a manager in order: because training is done, because the process was told to stop, or by an exception."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Final

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import ExitCode, ReportPhase
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import (
    ClosedError,
    FencedError,
    NoticeDeadlineError,
    PeerLostError,
    SaveError,
    StepkeeperError,
)
from stepkeeper.loggers import logger
from stepkeeper.process_end.fence import show_exception
from stepkeeper.save.saver import Saver
from stepkeeper.training.last_step import EndOfRank, judge_last_step
from stepkeeper.training.sigterm_handler import is_raised_by_handler
from stepkeeper.training.step_controller import StepController
from stepkeeper.training.termination import format_traceback, process_exit_code

__all__ = ["Shutdown"]

_log: Final = logger("stepkeeper")
_READ_S: Final = 5.0
"""Seconds that the other ranks have to read rank 0's last message."""

_STOP_S: Final = 10.0
"""Seconds by which ranks whose programs end themselves because of a notice may come apart."""

_LAST_WORD_S: Final = 1.0
"""Seconds for what a rank says to the others when it leaves."""

_NOTICED_S: Final = 1.0
"""Seconds in which it is known that a rank has ended, once a collective of the training has failed for that."""

_WITH_CODES: Final = (FencedError, PeerLostError, NoticeDeadlineError)
"""Errors that end the process with a code that means something; Python's own for an exception is 1."""

_STUCK_S: Final = 2.0
"""Seconds that a save has to end once nothing that it could wait for is there any more."""

_HOOKS_S: Final = 60.0
"""Seconds that the hooks of the last saves may take when training is done."""


class Shutdown:
    """End a manager, once, and with it the process where that was asked for."""

    def __init__(
        self,
        controller: StepController,
        saver: Saver,
        progress: Progress,
        companion: Companion,
        rank_group: RankGroup,
        *,
        waits: Waits,
    ) -> None:
        self._controller = controller
        self._saver = saver
        self._progress = progress
        self._companion = companion
        self._rank_group = rank_group
        self._waits = waits
        self.closed = False
        saver.on_fence(self.tell_fence, is_pods=controller.process_exit.is_pods)

    def check_open(self) -> None:
        """Check that the manager isn't closed.

        Raises:
            ClosedError: It is closed.

        """
        if self.closed:
            raise ClosedError("this manager is closed; construct another one")

    def raise_failure(self, *, newest: bool = False) -> None:
        """Raise the error of a save that failed in the background since the last call, if there is one.

        Args:
            newest: True if no later save can make the failure good.

        Raises:
            ClosedError: The manager is closed.
            FencedError: A save failed because another claim owns the root.
            PeerLostError: A save failed because another rank is lost.
            SaveError: A save failed for another reason.

        """
        self.check_open()
        self._saver.raise_failure(newest=newest)

    @contextmanager
    def record_fencing(self) -> Iterator[None]:
        """Remember a FencedError that is raised within, whatever the program does with it."""
        try:
            yield
        except FencedError as error:
            self._saver.record_fence(error)
            raise

    def tell_fence(self, fence: FencedError) -> None:
        """Write the termination message as soon as it is known that the process has lost its root. Any thread calls it.

        Args:
            fence: What has told that another claim owns the root.

        """
        if not self.closed:
            self._write_termination_message(ExitCode.FENCED, str(fence))

    def exit_if_stopped(self) -> None:
        """End this process with exit code 75 if it was told to stop and has saved for that; else do nothing.

        Raises:
            FencedError: It was told to stop, and another claim owns the root.

        """
        if self._controller.stopped:
            self._raise_fence()
            self._end(ExitCode.SAVED, None, for_good=True)
            sys.exit(ExitCode.SAVED)

    def close(self) -> None:
        """Finish the training: commit the saves in flight and the last finished step, and report to the operator.

        What the saves make superfluous is deleted before.

        If the caller has been told before that another claim owns the root, the manager is closed, and says that this
        is how the training ended.

        Raises:
            StepkeeperError: A save in the background failed.
            PeerLostError: A rank did not come.
            SystemExit: The program has ended itself in another rank because of a notice.

        Ranks:
            All ranks call this.

        """
        if self.closed:
            return
        self._saver.wait_until_idle()
        self._await_hooks()
        self.raise_failure(newest=True)
        if (fence := self._saver.fence) is not None:
            self._end(ExitCode.FENCED, str(fence), fence)
            return
        self._saver.await_upkeep()
        end = self._agree_on_last_step()
        if end["stops"]:
            self._stop_at_last_step(saves=end["saves"])
            self.exit_if_stopped()
        if end["saves"]:
            self._save_last_step()
            self._await_hooks()
            self._saver.await_upkeep()
            # Only now may a rank leave: until then the others need it for their commit.
            self._meet("saved", lambda _: {})
        self._progress.set_phase(ReportPhase.DONE)
        self._end(ExitCode.DONE, None)

    def _await_hooks(self) -> None:
        # Hooks may still call the manager.
        left_s = self._controller.process_exit.grace_left_s()
        self._saver.await_hooks(_HOOKS_S if left_s is None else min(_HOOKS_S, left_s))

    def _agree_on_last_step(self, timeout_s: float | None = None, *, stops: bool = False) -> dict[str, bool]:
        """Meet all ranks at the training's end, and agree on whether they still have a step to save.

        Args:
            timeout_s: Seconds to wait for the other ranks; by default as long as ranks may be apart.
            stops: True if this program has ended itself because of a notice.

        Returns:
            `saves`: whether they have; and `stops`: whether a program has ended itself because of a notice.

        """
        controller = self._controller
        last = controller.unsaved_step
        own = EndOfRank(
            step=None if last is None else last.step, changed=controller.last_step.has_changed, stops=stops
        )

        def judge(said: list[dict[str, Any]]) -> dict[str, bool]:
            ends = [EndOfRank(**each) for each in said]
            saves, complaint = judge_last_step(ends)
            if complaint is not None:
                _log.warning("%s", complaint)
            return {"saves": saves, "stops": any(end.stops for end in ends)}

        return self._meet("done", judge, asdict(own), timeout_s)

    def _save_last_step(self) -> None:
        """Save the last finished step, and wait for its commit.

        Raises:
            StepkeeperError: The save failed.

        """
        request = self._controller.unsaved_step
        assert request is not None
        self._progress.set_phase(ReportPhase.SAVING)
        try:
            self._saver.await_commit(self._controller.start_save(request))
        except StepkeeperError:
            raise
        except Exception as error:
            raise SaveError(f"step {request.step}, the last one, can't be saved: {error}") from error

    def _meet(
        self,
        name: str,
        judge: Callable[[list[dict[str, Any]]], dict[str, Any]],
        own: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Wait for all ranks, and return what rank 0 concludes from what all say. Raises PeerLostError."""
        group, own = self._rank_group, own or {}
        if group.world_size == 1:
            return judge([own])
        limit_s = group.limits.apart_s if timeout_s is None else timeout_s
        met = group.gather(name, own, limit_s)
        return group.broadcast(f"all-{name}", judge(met) if met else None, 2 * limit_s)

    def leave_block(self, error: BaseException | None) -> None:
        """End the manager, and the process if need be, when the manager's block is left.

        Args:
            error: The exception that leaves the block, if any.

        Raises:
            SystemExit: The process was told to stop and has, or had no time for it, or another claim owns the root,
                or a rank is lost.
            StepkeeperError: A save in the background failed.

        """
        if self.closed:
            return
        failure = error
        if error is None or process_exit_code(error) == ExitCode.DONE:
            try:
                self._leave_in_order(error)
            except StepkeeperError as late:
                failure = late
            else:
                return
        assert failure is not None
        failure = self._end_with(failure)
        if isinstance(failure, _WITH_CODES):
            show_exception(failure)
            raise SystemExit(process_exit_code(failure)) from failure
        if failure is not error:
            raise failure

    def _leave_in_order(self, chosen: BaseException | None) -> None:
        """Exit with code 75 if ranks agreed to stop; else finish the training.

        Args:
            chosen: What asked for exit code 0, if anything did. After a notice that means a stop, not that training
                is done.

        """
        controller = self._controller
        if controller.agreed_to_stop:
            self._await_stop_save()
        elif chosen is not None and controller.notices.read_notice() is not None:
            self._stop_by_choice(interrupted=is_raised_by_handler(chosen))
        self.exit_if_stopped()
        self._raise_fence()
        self.close()

    def _stop_by_choice(self, *, interrupted: bool) -> None:
        """Stop at the last finished step: the program has ended itself because of a notice, as Lightning does.

        Where the other ranks' programs don't, they can't save with this one. What was saved before stays.

        Args:
            interrupted: True if that was within a step: the state is that of no step.

        """
        left_s = self._controller.process_exit.grace_left_s()
        saves = False
        if interrupted:
            self._controller.last_step.forget()
        try:
            end = self._agree_on_last_step(_STOP_S if left_s is None else min(_STOP_S, left_s), stops=True)
            saves = end["saves"]
        except (PeerLostError, NoticeDeadlineError) as error:
            _log.warning("the last step isn't saved: not all ranks end where this one does: %s", error)
        self._stop_at_last_step(saves=saves)

    def _stop_at_last_step(self, *, saves: bool) -> None:
        """Save the last finished step as one that all stop at, if `saves`, and wait for the saves in flight."""
        controller = self._controller
        request = controller.unsaved_step
        controller.notices.record_notice("peer")
        if saves and request is not None:
            self._progress.set_phase(ReportPhase.SAVING)
            controller.stop_save.start(request, controller.process_exit.grace_left_s())
        self._await_stop_save()

    def _await_stop_save(self) -> None:
        controller = self._controller
        controller.stop_save.wait(controller.process_exit.grace_left_s())
        controller.stopped = True

    def _raise_fence(self) -> None:
        """Raise the fence if one is known: another start goes on, so this process must not end as if it were done."""
        if (fence := self._saver.fence) is not None:
            raise FencedError(str(fence))

    def _end_with(self, error: BaseException) -> BaseException:
        """End the manager because of `error`: give a save in flight a little time, and other ranks none.

        Returns:
            The error to end the process with: `error`; or, if another claim is known to own the root, a FencedError;
            or, if another rank has ended without a word, a PeerLostError.

        """
        if self._rank_group.world_size > 1 and not isinstance(error, _WITH_CODES):
            left_s = self._controller.process_exit.grace_left_s()
            error = self._waits.explain(error, _NOTICED_S if left_s is None else min(_NOTICED_S, left_s))
        if not isinstance(error, PeerLostError | NoticeDeadlineError):
            alone = self._rank_group.world_size == 1
            # A rank may be lost, or the time of a notice be over, meanwhile: the error stays what it was.
            with suppress(StepkeeperError):
                self._saver.wait_until_idle(self._controller.process_exit.save_timeout_s(alone=alone))
        error = self._fenced(error)
        text = format_traceback(error)
        if text is not None:
            self._progress.set_error(text)
        left_for = None if isinstance(error, NoticeDeadlineError) else error
        self._end(process_exit_code(error), text, left_for, for_good=isinstance(error, _WITH_CODES))
        return error

    def _fenced(self, error: BaseException) -> BaseException:
        """Return `error`, or the fence if one is known: another start goes on, whatever this one has failed with."""
        fence = self._saver.fence
        if fence is None or isinstance(error, FencedError):
            return error
        fenced = FencedError(str(fence))
        fenced.__cause__ = error
        return fenced

    def _write_termination_message(
        self, code: int, error: str | None, failure: BaseException | None = None
    ) -> None:
        made, restored = self._saver.own_commit, self._saver.restored_commit
        self._controller.process_exit.write_termination_message(
            code, committed=made, restored=restored, error=error, failure=failure
        )

    def _end(
        self, code: int, error: str | None, failure: BaseException | None = None, *, for_good: bool = False
    ) -> None:
        """Write the termination message, send the last report, and end everything of this manager that runs.

        The other ranks are told first, with the `failure` if there is one: they may be waiting for this one. With
        `for_good` the process ends right after this.
        """
        if self.closed:
            return
        self.closed = True
        process_exit = self._controller.process_exit
        ends_s = time.monotonic() + process_exit.closing_timeout_s()
        with process_exit.end_in_time(code, for_good=for_good):
            self._write_termination_message(code, error or self._saver.error, failure)
            self._close_parts(code, failure, ends_s)

    def _close_parts(self, code: int, failure: BaseException | None, ends_s: float) -> None:
        """Close all parts by `ends_s`: each has a share of the time that those before it have left."""

        def share_s(part: float, most_s: float = math.inf) -> float:
            return min(most_s, part * max(0.0, ends_s - time.monotonic()))

        self._rank_group.announce_leave(failure, share_s(1 / 4, _LAST_WORD_S))
        self._rank_group.abort()
        self._controller.close(share_s(1 / 3))
        self._progress.send_latest_step()
        self._companion.close(share_s(7 / 8))
        self._saver.close(share_s(1, _STUCK_S))
        if code != ExitCode.PEER_LOST:
            self._rank_group.leave(share_s(1, _READ_S))
        if code != ExitCode.DONE:
            self._saver.await_hooks(share_s(1))
