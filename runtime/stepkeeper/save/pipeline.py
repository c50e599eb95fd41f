"""Run the saves of one rank: take snapshots in the train thread, move and persist them in two threads behind it.

One thread moves copies from the devices, so that these get their memory back while the save before still waits for
a store or for another rank. The other thread does everything else.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from traceback import clear_frames
from typing import Final
from weakref import WeakMethod

from stepkeeper.companion.messages import Committed
from stepkeeper.companion.progress import numeric_metrics
from stepkeeper.companion.supervisor import Companion, Origin
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import PeerLostError, SaveError, StepkeeperError
from stepkeeper.log import CommitRecord
from stepkeeper.loggers import logger
from stepkeeper.save.consistency import check_same_state
from stepkeeper.save.failures import SaveFailures
from stepkeeper.save.given_state import build_state
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.job import SaveJob
from stepkeeper.save.persist import persist_save
from stepkeeper.save.report import SaveClock, SaveReport, SaveState
from stepkeeper.save.request import SaveRequest
from stepkeeper.save.snapshot import Region, Snapshot, SnapshotTaker
from stepkeeper.save.watch.state_watch import StateWatch
from stepkeeper.save.worker import Worker
from stepkeeper.time_limits import TimeLimits

__all__ = ["SaveEnd", "SavePipeline"]

_log: Final = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnd:
    """The end of a save. `on_end` gets it before any thread that waits for the save goes on."""

    step: int
    record: CommitRecord | None
    upkeep: Future[None] | None
    """On rank 0: resolved when the work after the commit has ended."""

    error: BaseException | None
    idle: bool
    """True if no later save was started."""

    report: SaveReport


class SavePipeline:
    """Run the saves of one rank in the order of their start.

    At most `max_pending` snapshots are in host memory. One save more waits until one of them isn't needed any more.
    """

    def __init__(
        self,
        companion: Companion,
        rank_group: RankGroup,
        *,
        max_pending: int,
        device_budget_bytes: int | None = None,
        origin: Callable[[], Origin | None],
        is_continued: Callable[[Mapping[str, object]], bool],
        on_end: Callable[[SaveEnd], None],
        waits: Waits | None = None,
    ) -> None:
        self.state_watch: Final = StateWatch(rank_group.ranks)
        self._waits = waits or Waits()
        self._companion = companion
        self._rank_group = rank_group
        self._origin = origin
        self._is_continued = is_continued
        self._on_end = on_end
        self._free_regions = [Region() for _ in range(max_pending)]
        self._snapshots = SnapshotTaker(
            rank_group.ranks,
            device_budget_bytes=device_budget_bytes,
            waits=self._waits,
            limits=rank_group.limits,
        )
        self.prepared = False
        """True once what saves need is compiled."""

        self._pending: list[InFlight] = []
        self._number = 0
        self.failures: Final = SaveFailures()
        self._transfers = Worker("save-transfer", self._waits)
        self._persisting = Worker("save", self._waits)

    @property
    def in_flight(self) -> InFlight | None:
        """The newest save, until it has ended."""
        newest = self._pending[-1] if self._pending else None
        return None if newest is None or newest.done else newest

    def prepare(self, state: Mapping[str, object]) -> None:
        """Compile what saves of states built like this one need, and populate their memory. Later calls do nothing.

        Ranks: all ranks call this.
        """
        if self.prepared:
            return
        self.prepared = True
        size_bytes = self._snapshots.prepare(state)
        if self._snapshots.plan is not None:
            self.state_watch.note_prepared(state, self._snapshots.plan)
        region = self._free_regions[-1]
        region.reserve(size_bytes)
        self._transfers.submit(region.populate, size_bytes)

    def start_save(
        self, request: SaveRequest, timeout_s: float | None = None, *, clock: SaveClock | None = None
    ) -> InFlight:
        """Take a snapshot of the state and start its save. Wait first while too many saves are pending.

        Ranks: all ranks call this, in the same order.

        Args:
            request: The step and its state.
            timeout_s: Seconds to wait for earlier saves; None waits until they end or all waits do.
            clock: The save's clock, if it runs already.

        Raises:
            TimeoutError: Too many saves are still pending after `timeout_s`, or their copies still fill the
                devices. Nothing was started.
            NoticeDeadlineError: The time of a notice was over before. Nothing was started.
            PeerLostError: Another rank is lost. Nothing was started.

        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        clock = clock or SaveClock()
        # In the train thread, and before this call holds anything that it would have to give back.
        metrics = numeric_metrics(request.metrics)
        region = self._await_region(timeout_s)
        in_flight = InFlight(request.step, clock, self._waits)
        name = f"save/{self._number}"
        self._number += 1
        # With several ranks, one alone may ask for the result, and still all must go on alike.
        alone = self._rank_group.world_size == 1
        in_flight.on_raised = _hold_weakly(
            self.failures.forget_failure if alone else self.failures.remember_fence
        )
        left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
        snapshot: Snapshot | None = None
        try:
            state = build_state(request.state, request.step)
            snapshot = self._snapshots.take_snapshot(state, region, timeout_s=left_s)
            self.prepared = True
            clock.mark_released()
            transfer = self._transfers.submit(
                _transfer_snapshot, snapshot, region, clock, self._rank_group.limits
            )
        except BaseException as error:
            if snapshot is not None:
                snapshot.drop_copies()
            self._free_regions.append(region)
            self._persisting.submit(
                self._announce_refusal, name, request.step, f"{type(error).__name__}: {error}"
            )
            raise
        job = SaveJob(
            name=name,
            in_flight=in_flight,
            origin=self._origin(),
            is_continued=self._is_continued(state),
            snapshot=snapshot,
            region=region,
            transfer=transfer,
            release_region=partial(self._release_region, region, in_flight),
            metrics=metrics,
            is_last=request.is_last,
            note_progress=self._waits.note_progress,
        )
        self._pending.append(in_flight)
        self._persisting.submit(self._run_save, job)
        is_built = state is not request.state
        self.state_watch.check_save(request.step, state, snapshot.plan, is_built=is_built)
        return in_flight

    def _await_region(self, timeout_s: float | None) -> Region:
        """Wait for a region that no save needs any more, and take it. Raises as `start_save` does."""
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._free_regions:
            left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
            oldest = next((each for each in self._pending if not each.region_released.done()), None)
            if oldest is not None and not self._waits.await_all([oldest.region_released], left_s):
                raise TimeoutError(
                    f"the save of step {oldest.step} was still in flight after {timeout_s:.1f} s"
                )
            self._drop_ended()
        self._drop_ended()
        return self._free_regions.pop()

    def wait_until_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is in flight.

        Returns:
            False if one still is after `timeout_s` seconds.

        Raises:
            NoticeDeadlineError: The time of a notice was over before.
            PeerLostError: Another rank is lost.

        """
        return self._waits.await_all([pending.future for pending in self._pending], timeout_s)

    def close(self, timeout_s: float) -> None:
        """Wait until the saves in flight have ended, and give back the memory.

        Saves that are stuck in a device or a store's client are given up after `timeout_s` seconds.
        """
        ends_s = time.monotonic() + timeout_s
        ended = [each.close(ends_s - time.monotonic()) for each in (self._persisting, self._transfers)]
        if not all(ended):
            _log.error("a save was stuck for %.1f s and is given up: it won't be committed", timeout_s)
        for region in self._free_regions:
            region.close()
        self.failures.close()

    def _drop_ended(self) -> None:
        self._pending = [pending for pending in self._pending if not pending.done]

    def _run_save(self, job: SaveJob) -> None:
        in_flight = job.in_flight
        committed: Committed | None = None
        failure: BaseException | None = None
        try:
            committed = persist_save(job, self._companion, self._rank_group)
        except BaseException as error:  # `InFlight.result` raises it
            failure = error
        self.failures.record_outcome(failure)
        report = in_flight.end_save(committed, failure)
        in_flight.set_state(SaveState.COMMITTED if failure is None else SaveState.FAILED)
        try:
            self._on_end(
                SaveEnd(
                    step=in_flight.step,
                    record=None if committed is None else committed.record,
                    upkeep=in_flight.upkeep,
                    error=failure,
                    idle=in_flight is self._pending[-1],
                    report=report,
                )
            )
        except Exception:  # an error of the callback doesn't change how the save has ended
            _log.exception(
                "what step %d's save has come to could not be told",
                in_flight.step,
                extra={"step": in_flight.step},
            )
        finally:
            held = not in_flight.region_released.done()
            if held:
                # A transfer that is stuck may still write into its own.
                self._free_regions.append(job.region if job.transfer.done() else Region())
            if committed is None:
                in_flight.future.set_exception(failure)
            else:
                in_flight.future.set_result(committed)
            if held:
                in_flight.region_released.set_result(None)

    def _release_region(self, region: Region, in_flight: InFlight) -> None:
        """Let other saves use the region: this save goes on without its snapshot."""
        self._free_regions.append(region)
        in_flight.region_released.set_result(None)

    def _announce_refusal(self, name: str, step: int, refusal: str) -> None:
        """Tell the other ranks that this one has no snapshot for the save, so that they don't wait for its share."""
        with suppress(SaveError, PeerLostError):  # the train thread has raised the reason
            check_same_state(name, step, None, self._rank_group, refusal=refusal)


def _hold_weakly(call: Callable[[BaseException], None]) -> Callable[[BaseException], None]:
    """Hold the method weakly: a save that the training keeps, for its report, must not keep the manager alive."""
    held = WeakMethod(call)

    def ask(error: BaseException) -> None:
        if (found := held()) is not None:
            found(error)

    return ask


def _transfer_snapshot(snapshot: Snapshot, region: Region, clock: SaveClock, limits: TimeLimits) -> None:
    began_s = time.monotonic()
    try:
        snapshot.move_copies(region)
    except BaseException as error:
        # The remaining copies aren't needed. The error is kept until the save's turn, its frames' variables are not.
        snapshot.drop_copies()
        each: BaseException | None = error
        while each is not None:
            clear_frames(each.__traceback__)
            each = each.__cause__ or each.__context__
        if isinstance(error, StepkeeperError) or not isinstance(error, Exception):
            raise
        raise SaveError(f"the copies of the state did not come from the devices: {error}") from error
    limits.record_transfer(snapshot.transfer_bytes, time.monotonic() - began_s)
    clock.mark_transferred()
