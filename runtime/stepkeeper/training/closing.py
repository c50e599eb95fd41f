"""End everything of a manager that runs, within the time that its end may take."""

import math
import time
from typing import Final

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import ExitCode
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.errors import FencedError
from stepkeeper.fork_guard import forget_in_forks
from stepkeeper.save.saver import Saver
from stepkeeper.training.step_controller import StepController

__all__ = ["Closing"]

_READ_S: Final = 5.0
"""Seconds that the other ranks have to read rank 0's last message."""

_LAST_WORD_S: Final = 1.0
"""Seconds for what a rank says to the others when it leaves."""

_STUCK_S: Final = 2.0
"""Seconds that a save has to end once nothing that it could wait for is there any more."""


class Closing:
    """Close the parts of a manager, once, and leave word of how the process ends."""

    def __init__(
        self,
        controller: StepController,
        saver: Saver,
        progress: Progress,
        companion: Companion,
        rank_group: RankGroup,
    ) -> None:
        """Close nothing yet.

        Args:
            controller: Listens to notices and to the requests of other ranks.
            saver: Makes the saves.
            progress: Sends the last report.
            companion: Ends its process.
            rank_group: The ranks, which may be waiting for this one.

        """
        self._controller = controller
        self._saver = saver
        self._progress = progress
        self._companion = companion
        self._rank_group = rank_group
        self.is_closed = False
        forget_in_forks(self)
        saver.failures.on_fence(self.tell_fence, is_pods=controller.process_exit.is_pods)

    def forget_after_fork(self) -> None:
        """Be closed, in a forked child: the training and its end are its parent's."""
        self.is_closed = True

    def tell_fence(self, fence: FencedError) -> None:
        """Write the termination message as soon as it is known that the process has lost its root. Any thread calls it.

        Args:
            fence: What has told that another claim owns the root.

        """
        if not self.is_closed:
            self._write_termination_message(ExitCode.FENCED, str(fence))

    def close(
        self, code: int, error: str | None, failure: BaseException | None = None, *, for_good: bool = False
    ) -> None:
        """Write the termination message, send the last report, and end everything of this manager that runs.

        The other ranks are told first: they may be waiting for this one. A second call does nothing.

        Args:
            code: The exit code that the process is to end with.
            error: What went wrong, for people; None for what a save has failed with, if anything.
            failure: What the other ranks are told that this one ends for, if anything.
            for_good: True if the process ends right after this.

        """
        if self.is_closed:
            return
        self.is_closed = True
        if for_good:
            self._controller.notices.keep_exit_code(code)
        ends_s = time.monotonic() + self._controller.grace.closing_timeout_s()
        with self._controller.process_exit.end_in_time(code, for_good=for_good):
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

    def _write_termination_message(
        self, code: int, error: str | None, failure: BaseException | None = None
    ) -> None:
        made, restored = self._saver.lineage.own_commit, self._saver.lineage.restored_commit
        self._controller.process_exit.write_termination_message(
            code, committed=made, restored=restored, error=error, failure=failure
        )
