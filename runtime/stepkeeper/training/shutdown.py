"""End a manager in order: because training is done, because the process was told to stop, or by an exception."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from stepkeeper.companion.progress import Progress
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
from stepkeeper.training.closing import Closing
from stepkeeper.training.end_agreement import EndAgreement, EndChoice, EndOfRank
from stepkeeper.training.notices.data_loaders import (
    bearing_ends_of_children,
    interrupts_a_step,
    is_end_of_workers,
)
from stepkeeper.training.step_controller import StepController
from stepkeeper.training.termination import format_traceback, process_exit_code

__all__ = ["Shutdown"]

_log: Final = logger("stepkeeper")
_STOP_S: Final = 10.0
"""Seconds by which ranks whose programs end themselves because of a notice may come apart."""

_NOTICED_S: Final = 1.0
"""Seconds in which it is known that a rank has ended, once a collective of the training has failed for that."""

_WITH_CODES: Final = (FencedError, PeerLostError, NoticeDeadlineError)
"""Errors that end the process with a code that means something; Python's own for an exception is 1."""

_HOOKS_S: Final = 60.0
"""Seconds that the hooks of the last saves may take when training is done."""


class Shutdown:
    """End a manager, once, and with it the process where that was asked for."""

    def __init__(
        self,
        controller: StepController,
        saver: Saver,
        progress: Progress,
        rank_group: RankGroup,
        *,
        closing: Closing,
        waits: Waits,
    ) -> None:
        """End nothing yet.

        Args:
            controller: Knows the last finished step, and whether the process was told to stop.
            saver: Makes the saves.
            progress: Told of the phase that the training is in, for reports.
            rank_group: The ranks, which end together.
            closing: Closes all parts.
            waits: Knows whether another rank is lost.

        """
        self._controller = controller
        self._saver = saver
        self._progress = progress
        self._rank_group = rank_group
        self._closing = closing
        self._agreement: Final = EndAgreement(rank_group)
        self._waits = waits

    def check_open(self) -> None:
        """Check that the manager isn't closed.

        Raises:
            ClosedError: It is closed.

        """
        if self._closing.is_closed:
            raise ClosedError(
                "this manager is closed, or its process has forked this one; construct another one"
            )

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
        self._saver.failures.raise_failure(newest=newest)

    @contextmanager
    def record_fencing(self) -> Iterator[None]:
        """Remember a FencedError that is raised within, whatever the program does with it."""
        try:
            yield
        except FencedError as error:
            self._saver.failures.record_fence(error)
            raise

    def exit_if_stopped(self) -> None:
        """End this process with exit code 75 if it was told to stop and has saved for that; else do nothing.

        Raises:
            FencedError: It was told to stop, and another claim owns the root.

        """
        if self._controller.stopped:
            self._raise_fence()
            self._closing.close(ExitCode.SAVED, None, for_good=True)
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
        if self._closing.is_closed:
            return
        self._saver.wait_until_idle()
        self._await_hooks()
        self.raise_failure(newest=True)
        if (fence := self._saver.failures.fence) is not None:
            self._closing.close(ExitCode.FENCED, str(fence), fence)
            return
        self._saver.await_upkeep()
        end = self._agree_on_last_step()
        if end.stops:
            self._controller.stop_at_last_step(saves=end.saves)
            self.exit_if_stopped()
        if end.saves:
            self._save_last_step()
            self._await_hooks()
            self._saver.await_upkeep()
            self._agreement.await_saved()
        self._progress.set_phase(ReportPhase.DONE)
        self._closing.close(ExitCode.DONE, None)

    def _await_hooks(self) -> None:
        # Hooks may still call the manager.
        self._saver.await_hooks(self._controller.grace.bound_s(_HOOKS_S))

    def _agree_on_last_step(self, timeout_s: float | None = None, *, stops: bool = False) -> EndChoice:
        """Agree with all ranks on how they end; see `EndAgreement.agree`.

        Args:
            timeout_s: Seconds to wait for the other ranks; by default as long as ranks may be apart.
            stops: True if this program has ended itself because of a notice.

        """
        controller = self._controller
        last = controller.unsaved_step
        step = None if last is None else last.step
        return self._agreement.agree(
            EndOfRank(step=step, changed=controller.last_step.has_changed, stops=stops), timeout_s
        )

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

    def leave_block(self, error: BaseException | None) -> None:
        """End the manager, and the process if need be, when the manager's block is left.

        Args:
            error: The exception that leaves the block, if any.

        Raises:
            SystemExit: The process was told to stop and has, or had no time for it, or another claim owns the root,
                or a rank is lost.
            StepkeeperError: A save in the background failed.

        """
        if self._closing.is_closed:
            return
        failure = error
        if error is None or process_exit_code(error) == ExitCode.DONE or self._follows_notice(error):
            try:
                with bearing_ends_of_children():
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

    def _follows_notice(self, error: BaseException) -> bool:
        """Tell whether the training ends for the end of its data's workers, who were told to stop as it was."""
        return is_end_of_workers(error) and self._controller.notices.read_notice() is not None

    def _leave_in_order(self, chosen: BaseException | None) -> None:
        """Exit with code 75 if ranks agreed to stop; else finish the training.

        Args:
            chosen: What asked for exit code 0, or ended the training after a notice, if anything did. After a notice
                that means a stop, not that training is done.

        """
        controller = self._controller
        if controller.agreed_to_stop:
            controller.await_stop_save()
        elif chosen is not None and controller.notices.read_notice() is not None:
            self._stop_by_choice(interrupted=interrupts_a_step(chosen))
        self.exit_if_stopped()
        self._raise_fence()
        self.close()

    def _stop_by_choice(self, *, interrupted: bool) -> None:
        """Stop at the last finished step: the program has ended itself because of a notice, as Lightning does.

        Where the other ranks' programs don't, they can't save with this one. What was saved before stays.

        Args:
            interrupted: True if that was within a step: the state is that of no step.

        """
        saves = False
        if interrupted:
            self._controller.last_step.forget()
        try:
            end = self._agree_on_last_step(self._controller.grace.bound_s(_STOP_S), stops=True)
            saves = end.saves
        except (PeerLostError, NoticeDeadlineError) as error:
            _log.warning("the last step isn't saved: not all ranks end where this one does: %s", error)
        self._controller.stop_at_last_step(saves=saves)

    def _raise_fence(self) -> None:
        """Raise the fence if one is known: another start goes on, so this process must not end as if it were done."""
        if (fence := self._saver.failures.fence) is not None:
            raise FencedError(str(fence))

    def _end_with(self, error: BaseException) -> BaseException:
        """End the manager because of `error`: give a save in flight a little time, and other ranks none.

        Returns:
            The error to end the process with: `error`; or, if another claim is known to own the root, a FencedError;
            or, if another rank has ended without a word, a PeerLostError.

        """
        if self._rank_group.world_size > 1 and not isinstance(error, _WITH_CODES):
            error = self._waits.explain(error, self._controller.grace.bound_s(_NOTICED_S))
        if not isinstance(error, PeerLostError):
            alone = self._rank_group.world_size == 1
            # A rank may be lost, or the time of a notice be over, meanwhile: the error stays what it was. Where it is
            # another manager's time that is over, this one's save may still be committed.
            with suppress(StepkeeperError):
                self._saver.wait_until_idle(self._controller.grace.save_timeout_s(alone=alone))
        error = self._fenced(error)
        text = format_traceback(error)
        if text is not None:
            self._progress.set_error(text)
        left_for = None if isinstance(error, NoticeDeadlineError) else error
        self._closing.close(process_exit_code(error), text, left_for, for_good=isinstance(error, _WITH_CODES))
        return error

    def _fenced(self, error: BaseException) -> BaseException:
        """Return `error`, or the fence if one is known: another start goes on, whatever this one has failed with."""
        fence = self._saver.failures.fence
        if fence is None or isinstance(error, FencedError):
            return error
        fenced = FencedError(str(fence))
        fenced.__cause__ = error
        return fenced
