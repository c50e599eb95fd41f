"""Run the saves of one rank: take snapshots in the train thread, move and persist them in two threads.

One thread moves copies from the devices, which frees the devices' memory while an earlier save still waits for a
store or for another rank. The other thread does everything else.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

from stepkeeper.companion.messages import Committed
from stepkeeper.companion.progress import select_stored_metrics
from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits, call_weakly
from stepkeeper.errors import CopiesDifferError, PeerLostError, SaveError
from stepkeeper.log import CommitRecord
from stepkeeper.loggers import logger
from stepkeeper.save.consistency import check_same_state
from stepkeeper.save.failures import SaveFailures
from stepkeeper.save.first_comparison import FirstComparison
from stepkeeper.save.given_state import SaveRequest, build_state
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.job import SaveJob
from stepkeeper.save.lineage import Lineage
from stepkeeper.save.pending import PendingSaves
from stepkeeper.save.persist import persist_save
from stepkeeper.save.report import SaveClock, SaveState
from stepkeeper.save.snapshot.region import Region
from stepkeeper.save.snapshot.take import Snapshot, SnapshotTaker
from stepkeeper.save.snapshot.transfer import transfer_snapshot
from stepkeeper.save.worker import Worker
from stepkeeper_planners.garbage import without_collections
from stepkeeper_planners.loading.differences import list_with_state
from stepkeeper_planners.state.parameter_names import find_optimizers
from stepkeeper_planners.state.tree import FlatState

__all__ = ["SavePipeline", "seconds_until"]

_log: Final = logger(__name__)


class OnEnd(Protocol):
    """Handles the end of a save before any thread that waits for the save continues."""

    def __call__(
        self, save: InFlight, record: CommitRecord | None, error: BaseException | None, *, idle: bool
    ) -> None:
        """Handle the commit, or the error. `idle` is True if no later save was started."""
        ...


class SavePipeline:
    """Run the saves of one rank in the order of their start.

    At most `max_pending` snapshots are in host memory. A further save waits until one of them is no longer needed.
    """

    def __init__(
        self,
        companion: Companion,
        rank_group: RankGroup,
        *,
        max_pending: int,
        tolerated_failures: int,
        device_budget_bytes: int | None,
        all_first: bool,
        lineage: Lineage,
        on_end: OnEnd,
        waits: Waits,
    ) -> None:
        self._waits = waits
        self._companion = companion
        self._rank_group = rank_group
        self._lineage = lineage
        self._on_end = on_end
        self.pending: Final = PendingSaves(max_pending, self._waits)
        self._snapshots = SnapshotTaker(
            rank_group.ranks,
            device_budget_bytes=device_budget_bytes,
            all_first=all_first,
            waits=self._waits,
            limits=rank_group.limits,
        )
        self.prepared = False
        """True once the programs for saves are compiled, or are about to be."""

        self._primed: set[tuple[str, str]] | None = None
        """The parameters that optimizers had state for at the start; None if that is unknown, or was compared."""

        self._planning: Future[None] | None = None
        """Resolved once the first save is planned, if another thread plans it. None from the first save on."""

        self._is_closed = False
        self._number = 0
        self._max_pending: Final = max_pending
        self._after: set[int] = set()
        """For each save whose copies differed, the number of the first one that starts when all ranks know that."""

        self.failures: Final = SaveFailures(tolerated_failures)
        self._transfers = Worker("save-transfer", self._waits)
        self._persisting = Worker("save", self._waits)

    def prepare(self, flat: FlatState, *, in_background: bool = False) -> None:
        """Plan saves of such states, compile their programs and populate their memory, at the first call with tensors.

        `in_background`: another thread does it. Then nothing is raised: a save that can't be planned raises why.
        """
        if self.prepared:
            return
        # A state without tensors is that of a program that looks at a value before it builds the rest.
        self.prepared = bool(flat.tensors)
        # Only the train thread runs programs on devices: their order must be the same on all ranks.
        if in_background and all(tensor.is_cpu for tensor in flat.tensors.values()):
            self._planning = self._transfers.submit(self._plan_in_background, flat)
        else:
            with without_collections():
                self._plan(flat)

    def _plan_in_background(self, flat: FlatState) -> None:
        try:
            self._plan(flat)
        except Exception as error:  # the first save plans again, and raises it in the train thread
            _log.info("preparing saves failed, the first save retries: %s", error)

    def _plan(self, flat: FlatState) -> None:
        self._primed = list_with_state(flat.tensors, find_optimizers(flat.paths))
        region = self.pending.next_region
        size_bytes = self._snapshots.prepare(flat.tree, region, flat.modules)
        if self._is_closed:
            region.close()
        else:
            self._transfers.submit(region.populate, size_bytes)

    def start_save(
        self, request: SaveRequest, timeout_s: float | None = None, *, clock: SaveClock | None = None
    ) -> InFlight:
        """Take a snapshot of the state and start its save. All ranks call this, in the same order.

        It first waits while too many saves are pending. Nothing is started after a TimeoutError (earlier
        saves are still pending, or their copies still fill the devices, after `timeout_s`), a
        NoticeDeadlineError or a PeerLostError.
        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        clock = clock or SaveClock()
        # In the train thread, before this call holds anything that it would have to release.
        metrics = select_stored_metrics(request.metrics)
        if self._planning is not None and not self._waits.await_all([self._planning], timeout_s):
            raise TimeoutError(f"the first save was still being planned after {timeout_s:.1f} s")
        self._planning = None
        region = self.pending.take_region(seconds_until(ends_s))
        # Only now: the save that freed the region may have failed, so that all ranks compare their copies first.
        number = self._number
        name, compare = f"save/{number}", None
        is_awaited = number in self._after or request.is_last
        waits = self._waits  # so that the job's lambda doesn't keep this object alive
        in_flight, transfer = None, None
        try:
            self._number += 1
            if self._rank_group.world_size > 1 and (number == 0 or is_awaited):
                compare = FirstComparison(
                    name, request.step, self._rank_group, waits, reads_devices=is_awaited
                )
            in_flight = self._follow_save(request.step, clock)
            state = build_state(request.state, request.step)
            snapshot, transfer = self._take_snapshot(request, state, region, clock, ends_s, compare=compare)
            job = SaveJob(
                name=compare.name if compare else name,
                in_flight=in_flight,
                origin=self._lineage.origin,
                is_continued=self._lineage.is_continued(state),
                snapshot=snapshot,
                region=region,
                transfer=transfer,
                release_region=partial(self.pending.release_region, region, in_flight),
                metrics=metrics,
                is_last=request.is_last,
                note_moved=lambda _n_bytes: waits.note_progress(),
            )
            self._warn_of_unprimed(request.step, snapshot)
            clock.mark_released()
            self.pending.add(in_flight)
            self._persisting.submit(self._run_save, job, number)
        except BaseException as error:
            if compare and error is compare.failure and in_flight is not None:
                # All ranks have it, and none has a snapshot.
                self.pending.add(in_flight)
                self._persisting.submit(self._end_save, number, in_flight, region, None, error)
                return in_flight
            if in_flight is not None:
                self.pending.drop(in_flight)
            # A transfer that has begun may still write into the region: give back an empty one in its place.
            self.pending.give_back(region if transfer is None else Region())
            self._refuse(compare.name if compare else name, request.step, error)
            raise
        return in_flight

    def _refuse(self, name: str, step: int, error: BaseException) -> None:
        """Report, in the order of the saves, that this rank takes no part in one."""
        refusal = f"{type(error).__name__}: {error}"
        try:
            self._persisting.submit(self._announce_refusal, name, step, refusal)
        except SaveError:  # no thread can be started
            self._announce_refusal(name, step, refusal)

    def _follow_save(self, step: int, clock: SaveClock) -> InFlight:
        in_flight = InFlight(step, clock, self._waits)
        # With several ranks, one alone may ask for the result, and still all must continue in the same way.
        alone = self._rank_group.world_size == 1
        # Weakly: a save that the training keeps, for its report, must not keep the manager alive.
        in_flight.on_raised = call_weakly(
            self.failures.forget_failure if alone else self.failures.remember_fence
        )
        return in_flight

    def _take_snapshot(
        self,
        request: SaveRequest,
        state: Mapping[str, object],
        region: Region,
        clock: SaveClock,
        ends_s: float | None,
        *,
        compare: FirstComparison | None,
    ) -> tuple[Snapshot, Future[None]]:
        """Take the snapshot by `ends_s`, and have its copies moved into the region. Raises as `start_save` does."""
        snapshot = self._snapshots.take_snapshot(
            state, region, timeout_s=seconds_until(ends_s), on_tensors=request.on_tensors, compare=compare
        )
        try:
            self.prepared = True
            return snapshot, self._transfers.submit(transfer_snapshot, snapshot, region, clock)
        except BaseException:
            snapshot.drop_copies()
            raise

    def _warn_of_unprimed(self, step: int, snapshot: Snapshot) -> None:
        """Warn at the first save after a restore, on rank 0, of optimizers that have created state since."""
        primed, self._primed = self._primed, None
        if primed is None or self._rank_group.rank != 0:
            return
        plan = snapshot.plan
        made = list_with_state((layout.fqn for layout in plan.layouts), find_optimizers(plan.names)) - primed
        if made:
            _log.warning(
                "step %d is saved with state of an optimizer that had none when this process restored (%s). If the "
                "next start passes the state as this one did, its restore will refuse the commit: call "
                "prime_optimizer(optimizer) before the restore",
                step,
                ", ".join(sorted({name or "the state" for name, _ in made})),
                extra={"step": step},
            )

    def close(self, timeout_s: float) -> None:
        """Wait until the saves in flight have ended, or are given up as stuck, and give back the memory."""
        self._is_closed = True
        ends_s = time.monotonic() + timeout_s
        ended = [each.close(ends_s - time.monotonic()) for each in (self._persisting, self._transfers)]
        # While only the first save is being planned, none was started.
        if not all(ended) and self._planning is None:
            _log.error("a save was stuck for %.1f s and is given up: it won't be committed", timeout_s)
        self.pending.close()
        self.failures.close()

    def _run_save(self, job: SaveJob, number: int) -> None:
        committed: Committed | None = None
        failure: BaseException | None = None
        try:
            committed = persist_save(job, self._companion, self._rank_group)
        except BaseException as error:  # `InFlight.result` raises it
            failure = error
        # A transfer that is stuck may still write into the region: give back an empty one in its place.
        region = job.region if job.transfer.done() else Region()
        self._end_save(number, job.in_flight, region, committed, failure)

    def _end_save(
        self,
        number: int,
        in_flight: InFlight,
        region: Region,
        committed: Committed | None,
        failure: BaseException | None,
    ) -> None:
        """Report how a save has ended, and give back its region unless that was done."""
        if isinstance(failure, CopiesDifferError):
            self._after.add(number + self._max_pending)
        self.failures.record_outcome(failure)
        in_flight.end_save(committed, failure)
        in_flight.set_state(SaveState.COMMITTED if failure is None else SaveState.FAILED)
        try:
            record = None if committed is None else committed.record
            self._on_end(in_flight, record, failure, idle=self.pending.is_newest(in_flight))
        except Exception:  # an error of the callback doesn't change how the save has ended
            _log.exception(
                "the outcome of the save of step %d could not be reported",
                in_flight.step,
                extra={"step": in_flight.step},
            )
        finally:
            held = not in_flight.region_released.done()
            if held:
                self.pending.give_back(region)
            if committed is None:
                in_flight.future.set_exception(failure)
            else:
                in_flight.future.set_result(committed)
            if held:
                in_flight.region_released.set_result(None)

    def _announce_refusal(self, name: str, step: int, refusal: str) -> None:
        """Report that this rank has no snapshot for the save, so that the other ranks don't wait for its share."""
        with suppress(SaveError, PeerLostError):  # the train thread has raised the reason
            check_same_state(name, step, None, self._rank_group, refusal=refusal)


def seconds_until(ends_s: float | None) -> float | None:
    """Return the seconds that are left until `ends_s` of time.monotonic(); None without a limit."""
    return None if ends_s is None else max(0.0, ends_s - time.monotonic())
