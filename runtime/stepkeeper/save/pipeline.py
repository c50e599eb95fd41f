"""Saves: a snapshot in the train thread, and behind it one thread that empties the devices, one for all the rest.

So the devices have their room back whatever the save before is waiting for: a store, or another rank.
"""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
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
from stepkeeper.errors import CompanionLostError, FencedError, PeerLostError, SaveError, StepkeeperError
from stepkeeper.log import CommitRecord
from stepkeeper.loggers import logger
from stepkeeper.save.consistency import check_same_state
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.persist import SaveJob, persist
from stepkeeper.save.report import SaveClock, SaveReport, SaveState
from stepkeeper.save.request import SaveRequest
from stepkeeper.save.snapshot import Region, Snapshot, Snapshots

__all__ = ["SaveEnd", "SavePipeline"]

_log: Final = logger(__name__)
_MOST_LOST_IN_A_ROW: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnd:
    """How a save ended; told before anybody who waits for it goes on."""

    step: int
    record: CommitRecord | None
    error: BaseException | None
    idle: bool
    """No later save was begun."""

    report: SaveReport


class SavePipeline:
    """Saves of one rank, in the order they were begun.

    Host memory is bounded by `max_pending` snapshots: one save more waits until one of them is needed no more.
    """

    def __init__(
        self,
        companion: Companion,
        rank_group: RankGroup,
        *,
        max_pending: int,
        device_budget_bytes: int | None = None,
        origin: Callable[[], Origin | None],
        on_end: Callable[[SaveEnd], None],
    ) -> None:
        self._companion = companion
        self._rank_group = rank_group
        self._origin = origin
        self._on_end = on_end
        self._free = [Region() for _ in range(max_pending)]
        self._snapshots = Snapshots(rank_group.ranks, device_budget_bytes=device_budget_bytes)
        self._prepared = False
        self._pending: list[InFlight] = []
        self._number = 0
        self._lost_in_a_row = 0
        self._failure: BaseException | None = None
        self._unmended: BaseException | None = None
        self._noting = threading.Lock()
        # Their threads are waited for when the interpreter ends: a save that was begun is finished.
        self._transfers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save-transfer")
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")

    @property
    def in_flight(self) -> InFlight | None:
        """The newest save, until it has ended."""
        newest = self._pending[-1] if self._pending else None
        return None if newest is None or newest.done else newest

    def prepare(self, state: Mapping[str, object]) -> None:
        """Saves of states built like this one compile nothing, and find memory that is there. Done once.

        Ranks: all.
        """
        if self._prepared:
            return
        self._prepared = True
        size_bytes = self._snapshots.prepare(state)
        region = self._free[-1]
        region.reserve(size_bytes)
        self._transfers.submit(region.populate, size_bytes)

    def start_save(
        self, request: SaveRequest, timeout_s: float | None = None, *, clock: SaveClock | None = None
    ) -> InFlight:
        """Take a snapshot of the state and send it on its way. Waits first while too many saves are pending.

        Ranks: all, in the same order.

        Raises:
            TimeoutError: too many still are after `timeout_s`, or the devices are full of their copies: nothing was
                begun.

        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        clock = clock or SaveClock()
        # In this thread, and before anything is held that would have to be given back.
        metrics = numeric_metrics(request.metrics)
        region = self._free_region(timeout_s)
        in_flight = InFlight(request.step, clock)
        name = f"save/{self._number}"
        self._number += 1
        if self._rank_group.world_size == 1:
            # Of several ranks one may ask, but all go on alike.
            in_flight.heard = _weakly(self.heard)
        left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
        snapshot: Snapshot | None = None
        try:
            snapshot = self._snapshots.take(request.state, region, timeout_s=left_s)
            self._prepared = True
            clock.released()
            transferred = self._transfers.submit(_transfer, snapshot, region, clock)
        except BaseException as error:
            if snapshot is not None:
                snapshot.drop()
            self._free.append(region)
            self._executor.submit(self._tell_refusal, name, request.step, f"{type(error).__name__}: {error}")
            raise
        job = SaveJob(
            name=name,
            in_flight=in_flight,
            origin=self._origin(),
            snapshot=snapshot,
            region=region,
            transferred=transferred,
            release=partial(self._release, region, in_flight),
            metrics=metrics,
            is_last=request.is_last,
        )
        self._pending.append(in_flight)
        self._executor.submit(self._run, job)
        return in_flight

    def _free_region(self, timeout_s: float | None) -> Region:
        """Memory that no save needs any more, waited for. Raises TimeoutError."""
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._free:
            left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
            oldest = next((each for each in self._pending if not each.released.done()), None)
            if oldest is not None and wait_for([oldest.released], left_s).not_done:
                raise TimeoutError(
                    f"the save of step {oldest.step} was still in flight after {timeout_s:.1f} s"
                )
            self._forget_ended()
        self._forget_ended()
        return self._free.pop()

    def wait(self, timeout_s: float | None = None) -> bool:
        """True if no save is in flight any more."""
        return not wait_for([pending.future for pending in self._pending], timeout_s).not_done

    def take_failure(self, *, newest: bool = False) -> BaseException | None:
        """Why a save in the background failed, if one did since the last call.

        One lost companion is forgiven as long as a later save makes it good, and so are devices that were full, for
        fewer copies are made each time; with `newest` neither is.
        """
        with self._noting:
            failure = self._failure or (self._unmended if newest else None)
            self._failure = None
            if newest or failure is self._unmended:
                self._unmended = None
            return failure

    def heard(self, error: BaseException) -> None:
        """Who was told of it, and went on, isn't told again. That others own the root stays true.

        Ranks: all or none.
        """
        if isinstance(error, FencedError | PeerLostError):
            return
        with self._noting:
            self._failure = None if self._failure is error else self._failure
            self._unmended = None if self._unmended is error else self._unmended

    def close(self) -> None:
        """Saves in flight have ended, the memory is given back."""
        self._executor.shutdown(wait=True)
        self._transfers.shutdown(wait=True)
        for region in self._free:
            region.close()

    def _forget_ended(self) -> None:
        self._pending = [pending for pending in self._pending if not pending.done]

    def _run(self, job: SaveJob) -> None:
        in_flight = job.in_flight
        committed: Committed | None = None
        failure: BaseException | None = None
        try:
            committed = persist(job, self._companion, self._rank_group)
        except BaseException as error:  # it goes to whoever asks for the result
            failure = error
        self._note(failure)
        report = in_flight.conclude(committed, failure)
        in_flight.reach(SaveState.COMMITTED if failure is None else SaveState.FAILED)
        try:
            self._on_end(
                SaveEnd(
                    step=in_flight.step,
                    record=None if committed is None else committed.record,
                    error=failure,
                    idle=in_flight is self._pending[-1],
                    report=report,
                )
            )
        except Exception:  # of whoever is told: the save has ended as it has
            _log.exception(
                "what step %d's save has come to could not be told",
                in_flight.step,
                extra={"step": in_flight.step},
            )
        finally:
            held = not in_flight.released.done()
            if held:
                self._free.append(job.region)
            if committed is None:
                in_flight.future.set_exception(failure)
            else:
                in_flight.future.set_result(committed)
            if held:
                in_flight.released.set_result(None)

    def _release(self, region: Region, in_flight: InFlight) -> None:
        """The save goes on without its snapshot."""
        self._free.append(region)
        in_flight.released.set_result(None)

    def _tell_refusal(self, name: str, step: int, refusal: str) -> None:
        """The other ranks don't wait for this one's share of a save that it has no snapshot for."""
        with suppress(SaveError, PeerLostError):  # the train thread has raised the reason
            check_same_state(name, step, None, self._rank_group, refusal=refusal)

    def _note(self, failure: BaseException | None) -> None:
        with self._noting:
            if failure is None:
                self._unmended = None
                self._lost_in_a_row = 0
                return
            self._unmended = failure
            self._lost_in_a_row = self._lost_in_a_row + 1 if isinstance(failure, CompanionLostError) else 0
            mends = isinstance(failure, StepkeeperError) and failure.next_save_mends
            if not mends or self._lost_in_a_row >= _MOST_LOST_IN_A_ROW:
                self._failure = failure


def _weakly(call: Callable[[BaseException], None]) -> Callable[[BaseException], None]:
    """Who keeps a save to read its report keeps nothing else of its manager."""
    held = WeakMethod(call)

    def ask(error: BaseException) -> None:
        if (found := held()) is not None:
            found(error)

    return ask


def _transfer(snapshot: Snapshot, region: Region, clock: SaveClock) -> None:
    try:
        snapshot.transfer(region)
    except BaseException as error:
        # What is still on the devices is needed no more, and the error is kept until the save's turn has come.
        snapshot.drop()
        each: BaseException | None = error
        while each is not None:
            clear_frames(each.__traceback__)
            each = each.__cause__ or each.__context__
        if isinstance(error, StepkeeperError) or not isinstance(error, Exception):
            raise
        raise SaveError(f"the copies of the state did not come from the devices: {error}") from error
    clock.transferred()
