"""Start and await the saves of this process, and handle their failures, for the train thread."""

import threading
import time
from collections.abc import Mapping
from typing import Final

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.coordination.mixed_state import MixedState
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.root_check import RootProof
from stepkeeper.coordination.upkeep_wait import UpkeepWait
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import CopiesDifferError, StepkeeperError
from stepkeeper.log import CommitRecord
from stepkeeper.log.foreign_steps import Restorable
from stepkeeper.policy.keep import KeepPolicy
from stepkeeper.policy.save import SaveCost
from stepkeeper.save.given_state import SaveRequest
from stepkeeper.save.hooks import SaveHooks
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.lineage import Lineage
from stepkeeper.save.pipeline import SavePipeline, seconds_until
from stepkeeper.save.report import RecentCosts, SaveClock
from stepkeeper.save.room import log_room
from stepkeeper.storage import Store
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.state.tree import FlatState

__all__ = ["Saver"]

_CLOSE_S: Final = 60.0
_STARTING: Final = "starting a save"


class Saver:
    """Save this process's states, and remember what was restored and committed."""

    def __init__(
        self,
        store: Store,
        companion: Companion,
        rank_group: RankGroup,
        progress: Progress,
        *,
        max_pending: int,
        tolerated_failures: int = 0,
        keep: KeepPolicy | None = None,
        device_budget_bytes: int | None = None,
        all_first: bool = False,
        save_hooks: SaveHooks | None = None,
        waits: Waits | None = None,
        mixed_state: MixedState | None = None,
    ) -> None:
        self._waits = waits or Waits()
        self.mixed_state: Final = mixed_state or MixedState()
        self._rank_group = rank_group
        self._progress = progress
        self._save_hooks = save_hooks or SaveHooks()
        self._recent_costs = RecentCosts()
        self._uri: Final = store.uri
        self._keep: Final = keep
        self._proof = RootProof(store, rank_group)
        self.lineage: Final = Lineage(companion)
        self._error: str | None = None
        self._newest_save: InFlight | None = None
        self._turn = threading.Lock()
        self._upkeep = UpkeepWait(rank_group, self._waits)
        self._pipeline = SavePipeline(
            companion,
            rank_group,
            max_pending=max_pending,
            tolerated_failures=tolerated_failures,
            device_budget_bytes=device_budget_bytes,
            all_first=all_first,
            lineage=self.lineage,
            on_end=self._on_save_ended,
            waits=self._waits,
        )
        self.failures: Final = self._pipeline.failures

    @property
    def error(self) -> str | None:
        """The failure of the newest save that has ended; None if it was committed."""
        return self._error

    @property
    def cost(self) -> SaveCost | None:
        """The cost of a save, by the latest commits; None before the first."""
        return self._recent_costs.cost

    @property
    def in_flight(self) -> InFlight | None:
        """The newest save, until it has ended."""
        return self._pipeline.pending.in_flight

    @property
    def newest_save(self) -> InFlight | None:
        """The newest save, ended or not."""
        return self._newest_save

    @property
    def next_save_compares(self) -> bool:
        """True if the newest save has failed as copies differed, on all ranks. The last save compares them first."""
        newest = self._newest_save
        return newest is not None and newest.done and isinstance(newest.future.exception(), CopiesDifferError)

    def mark_latest_restored(
        self, record: Restorable | None, state: Mapping[str, object], rules: LoadRules
    ) -> None:
        """Note that the root is claimed, and that `state`, by `rules`, was restored from HEAD, `record`."""
        self.failures.forget_fence()
        self.lineage.mark_latest_restored(record, state, rules)
        self._forget_ended_save()

    def mark_restored(self, record: Restorable, state: Mapping[str, object], rules: LoadRules) -> None:
        """Note that `record` was restored into `state`: the next save continues from there, wherever HEAD is.

        No save may be in flight. If only a part was restored and the rest comes from another commit, the part
        doesn't change what the next save continues from.
        """
        self.lineage.mark_restored(record, state, rules)
        self._forget_ended_save()

    def _forget_ended_save(self) -> None:
        # The step of the same number is now another one, and may be saved too.
        if self._newest_save is not None and self._newest_save.done:
            self._newest_save = None

    def prepare(self, flat: FlatState, *, in_background: bool = False) -> None:
        """Prepare for saves of such states at the first call, as `SavePipeline.prepare` does."""
        # Another thread may be starting a save, and waiting for one that a slow store delays.
        if self._pipeline.prepared:
            return
        with self._waits.in_turn(self._turn, _STARTING):
            self._pipeline.prepare(flat, in_background=in_background)

    def start_save(self, request: SaveRequest, timeout_s: float | None = None) -> InFlight:
        """Take the snapshot of the state, once no other thread starts a save, and few enough are in flight.

        Raises TimeoutError if that, or the root's answer, takes longer than `timeout_s`; StorageError if the
        root isn't the same for all ranks, or can't hold a log; PartlyRestoredError, NoticeDeadlineError and
        PeerLostError.
        """
        self.mixed_state.check()
        clock = SaveClock()
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._waits.in_turn(self._turn, _STARTING, timeout_s):
            self._prove_root(seconds_until(ends_s))
            save = self._newest_save = self._pipeline.start_save(request, seconds_until(ends_s), clock=clock)
            self._progress.set_in_flight(request.step)
            # It may have ended before the line above.
            if save.ended:
                self._progress.set_in_flight(None)
        return save

    def await_commit(self, save: InFlight) -> None:
        """Wait, on all ranks, until `save` is committed.

        Raises its failure, which later calls don't raise again, except for the loss of the root or of a rank.
        """
        try:
            save.result()
        except Exception as error:
            self.failures.forget_failure(error)
            raise

    def forgive_failure(self, why: str | None) -> None:
        """Forget the failures of saves: the process stops, and the next one resumes. `why` is for people."""
        if why is not None:
            self._error = why
            self._progress.set_error(why)
        self.failures.pop_failure(newest=True)

    @property
    def is_root_proven(self) -> bool:
        """True once all ranks have restored or saved for the first time, and proved that they have the same root."""
        return self._proof.made

    def await_saves_and_prove_root(self) -> None:
        """Wait until no save is in flight, and prove that all ranks have the same root. Raises StorageError."""
        self.wait_until_idle()
        self._prove_root()

    def _prove_root(self, timeout_s: float | None = None) -> None:
        """Prove the root, unless that was done before. Raises as `start_save` does.

        Another thread makes the requests, because they may take longer than a notice allows. This one waits
        meanwhile: the clients of stores draw from Python's random numbers, and mustn't do so between the
        training's own draws.
        """
        if self._proof.made:
            return
        try:
            self._waits.run(self._proof.make, timeout_s)
        except TimeoutError as error:
            if timeout_s is None or isinstance(error, StepkeeperError):
                raise
            raise TimeoutError(
                f"no answer for {timeout_s:.1f} s from the root, which was not written to before, or from another rank"
            ) from error

    def wait_until_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no save is in flight. Return False if one still is after `timeout_s` seconds."""
        return self._pipeline.pending.wait_until_idle(timeout_s)

    def await_upkeep(self) -> None:
        """Wait until the newest commit is verified, and those that it makes superfluous are deleted.

        This ends early, without an error, if the process has to stop, a rank is lost, or a store is stuck.
        """
        self._upkeep.await_newest()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Wait until the saves in flight have ended, for `timeout_s` seconds at most, and give back their memory."""
        self._pipeline.close(timeout_s)

    def await_hooks(self, timeout_s: float) -> None:
        """Wait until the hooks of all ended saves have returned, at most `timeout_s` seconds."""
        self._save_hooks.await_hooks(timeout_s)

    def _on_save_ended(
        self, save: InFlight, record: CommitRecord | None, error: BaseException | None, *, idle: bool
    ) -> None:
        """Handle the end of a save. Called in the pipeline's thread."""
        assert save.report is not None
        if record is not None:
            begins = self.lineage.own_commit is None and self.lineage.restored_commit is None
            self.lineage.own_commit = record
            self._upkeep.note_commit(record.slot, save.upkeep)
            self._recent_costs.record(save.report)
        self._progress.record_stall(save.report.stall_s)
        self._error = None if error is None else f"the save of step {save.step} failed: {error}"
        self._progress.set_error(self._error)
        if idle:
            self._progress.set_in_flight(None)
        self._save_hooks.report_save(save.report)
        # Later starts find the commits that retention keeps on the disk.
        if record is not None and begins and self._rank_group.rank == 0:
            log_room(self._uri, save.report.total_bytes or 0, self._keep)
