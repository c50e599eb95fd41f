"""Follow one save from its begin to its commit."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from stepkeeper.companion.messages import Committed
from stepkeeper.save.report import SaveClock, SaveReport, SaveState

__all__ = ["InFlight"]


class InFlight:
    """A save that was begun, and what has become of it so far."""

    def __init__(self, step: int, clock: SaveClock | None = None) -> None:
        self.step: Final = step
        self.state = SaveState.TRANSFERRING
        self.future: Final[Future[Committed]] = Future()
        self.released: Final[Future[None]] = Future()
        """Its memory is another save's to use."""

        self.report: SaveReport | None = None
        """Where the time went; None until it has ended."""

        self.heard: Callable[[BaseException], None] = lambda _error: None
        """Told which failure `result` has raised."""

        self.clock: Final = clock or SaveClock()
        self._began_s = time.monotonic()
        self._size_bytes = 0

    def reach(self, state: SaveState) -> None:
        """Note that the save has come as far as `state`."""
        self.clock.reached(state)
        self.state = state

    def note_written(self, size_bytes: int) -> None:
        """Note that this rank's share, of so many bytes, is durable."""
        self._size_bytes = size_bytes

    def conclude(self, committed: Committed | None, error: BaseException | None) -> SaveReport:
        """End the save, and make its report."""
        record = None if committed is None else committed.record
        self.report = self.clock.report(
            self.step,
            size_bytes=self._size_bytes,
            sequence=None if record is None else record.slot,
            uri=None if committed is None else committed.uri,
            total_bytes=None if record is None else record.size_bytes,
            error=error,
        )
        return self.report

    @property
    def done(self) -> bool:
        """True once it is committed or failed."""
        return self.future.done()

    @property
    def ended(self) -> bool:
        """True from just before `done`, when its end is being told."""
        return self.state in (SaveState.COMMITTED, SaveState.FAILED)

    @property
    def failed(self) -> bool:
        """True once it is over and no commit came of it."""
        return self.state is SaveState.FAILED

    def result(self, timeout_s: float | None = None) -> Committed:
        """Wait for the commit to be in the log.

        Raises:
            TimeoutError: it isn't yet.
            RanksDifferError: the ranks' states differ: nothing was written.
            StepkeeperError: the save failed. Of a rank alone, no later call raises it again, but where it says that
                this process has lost the root; of several, the next call does, in all of them.

        """
        try:
            return self.future.result(timeout_s)
        except BaseException as error:
            self.heard(error)
            raise

    def duration_millis(self) -> int:
        """Count the milliseconds since its snapshot was begun."""
        return int((time.monotonic() - self._began_s) * 1000)
