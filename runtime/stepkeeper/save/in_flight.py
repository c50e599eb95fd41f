"""Follow one save from its start to its commit."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from typing_extensions import override

from stepkeeper.companion.messages import Committed
from stepkeeper.coordination.waits import Waits
from stepkeeper.save.report import SaveClock, SaveReport, SaveState

__all__ = ["InFlight"]


class InFlight:
    """A save that was started, and its progress so far."""

    def __init__(self, step: int, clock: SaveClock | None = None, waits: Waits | None = None) -> None:
        self._waits = waits or Waits()
        self.step: Final = step
        """The step that is saved."""

        self.state = SaveState.TRANSFERRING
        """The progress of the save."""

        self.future: Final[Future[Committed]] = Future()
        self.region_released: Final[Future[None]] = Future()
        """Resolved when another save may use this one's memory."""

        self.report: SaveReport | None = None
        """The save's cost in time; None until the save has ended."""

        self.upkeep: Future[None] | None = None
        """On rank 0, once the save is committed: resolved when the work after the commit has ended."""

        self.on_raised: Callable[[BaseException], None] = lambda _error: None
        """Called with each error that `result` raises."""

        self.clock: Final = clock or SaveClock()
        self._began_s = time.monotonic()
        self._durable_bytes = 0

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__} step {self.step}: {self.state.value}, {self.duration_millis() / 1000:.1f} s>"

    def set_state(self, state: SaveState) -> None:
        """Note that the save has reached `state`."""
        self.clock.mark_state(state)
        self.state = state

    def mark_share_durable(self, size_bytes: int) -> None:
        """Note that this rank's share, of `size_bytes`, is durable."""
        self._durable_bytes = size_bytes

    def end_save(self, committed: Committed | None, error: BaseException | None) -> None:
        """End the save, with the commit or the error, and make its report."""
        record = None if committed is None else committed.record
        self.report = self.clock.build_report(
            self.step,
            size_bytes=self._durable_bytes,
            sequence=None if record is None else record.slot,
            uri=None if committed is None else committed.uri,
            total_bytes=None if record is None else record.size_bytes,
            error=error,
        )

    @property
    def done(self) -> bool:
        """True once the save is committed or has failed."""
        return self.future.done()

    @property
    def ended(self) -> bool:
        """True once the save is committed or has failed. It turns true just before `done`, while callbacks run."""
        return self.state in (SaveState.COMMITTED, SaveState.FAILED)

    @property
    def failed(self) -> bool:
        """True once the save has ended without a commit."""
        return self.state is SaveState.FAILED

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """Wait until the commit is in the log.

        Ranks: any rank may call this.

        Args:
            timeout_s: Seconds to wait; None waits until the save has ended, or this process has to end.

        Returns:
            The report of the save: the sequence of its commit, its URI, and what it cost.

        Raises:
            TimeoutError: The save is still in flight after `timeout_s`.
            NoticeDeadlineError: A notice came, and its deadline passed first.
            PeerLostError: Another rank is lost.
            RanksDifferError: The ranks' states differ, and nothing was written.
            StepkeeperError: The save failed. In a job of one rank, later calls of the manager don't raise the
                failure again, except for the loss of the root. In a job of several ranks, the manager's next call
                raises it on all of them.
        """
        if not self._waits.await_all([self.future], timeout_s):
            raise TimeoutError(f"the save of step {self.step} was still in flight after {timeout_s:.1f} s")
        try:
            self.future.result(0)
        except BaseException as error:
            self.on_raised(error)
            raise
        assert self.report is not None
        return self.report

    def duration_millis(self) -> int:
        """Count the milliseconds since the save's start."""
        return int((time.monotonic() - self._began_s) * 1000)
