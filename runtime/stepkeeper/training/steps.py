"""Record the steps of a training, and decide which are saved."""

import time
from collections.abc import Callable
from typing import Final

from stepkeeper.companion.progress import Progress
from stepkeeper.companion.supervisor import Companion
from stepkeeper.contract import Directive
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.log.store_times import RestartHistory
from stepkeeper.loggers import logger
from stepkeeper.policy.save import AnyOf, Disruptions, OnPreemption, SavePolicy, parts_of
from stepkeeper.save.given_state import SaveRequest
from stepkeeper.save.in_flight import InFlight
from stepkeeper.save.saver import Saver
from stepkeeper.training.last_step import LastStep
from stepkeeper.training.save_decision import SaveConditions, SaveDecider

__all__ = ["DisruptionHistory", "TrainSteps"]

_log: Final = logger(__name__)


class TrainSteps:
    """Apply the save policy and the operator's requests in the train loop."""

    def __init__(
        self,
        policy: SavePolicy,
        rank_group: RankGroup,
        saver: Saver,
        *,
        progress: Progress,
        companion: Companion,
        saves_on_notice: bool,
        waits: Waits,
        on_met: Callable[[], None] = lambda: None,
    ) -> None:
        """Start without a step. Raises ValueError if `policy` saves on notices that aren't watched."""
        if OnPreemption() in parts_of(policy) and not saves_on_notice:
            raise ValueError("OnPreemption() contradicts stop_on_notice=False: remove one of them")
        policy = AnyOf((policy, OnPreemption())) if saves_on_notice else policy
        self._saver = saver
        self._progress = progress
        self._companion = companion
        self._disruptions = DisruptionHistory()
        self._is_alone = rank_group.world_size == 1
        self.decider: Final = SaveDecider(policy, rank_group, self._read_conditions, waits, on_met)
        self.last_step: Final = LastStep()

    def record(self, request: SaveRequest) -> None:
        """Record a finished step for reports. Raises PartlyRestoredError if its state is mixed."""
        self._saver.mixed_state.check()
        self._progress.record_step(request.step, request.metrics)

    def should_save(self, step: int, *, stopping: bool) -> bool:
        """Return True if the policy, a request, or an agreed stop (`stopping`) asks to save `step`."""
        newest = self._saver.newest_save
        # One save at the stop step, or after it, is enough: the program may have made it by itself.
        is_saved = newest is not None and newest.step >= (self.decider.stop_step or 0)
        return self.decider.is_save_due(step, stopping=stopping and not is_saved)

    def has_saved(self, step: int) -> bool:
        """Return True if the newest save is of `step`. With other ranks, also if it failed: they may not know yet."""
        newest = self._saver.newest_save
        return newest is not None and newest.step == step and not (self._is_alone and newest.failed)

    def start_save(self, request: SaveRequest) -> InFlight:
        """Start a save and restart the policy's clock."""
        self.decider.on_save_started()
        # If it can't be started, the caller gets the error, and the training's end doesn't retry it.
        return self._saver.start_save(self.last_step.follow_save(request))

    def follow_save_request(self, directive: Directive) -> None:
        """Request the save that the operator asks for, if any, from all ranks. Any thread may call this."""
        if directive.checkpoint_now is None or not self.decider.request_save(directive.checkpoint_now):
            return
        left_s = directive.save_within_s
        left = "" if left_s is None else f" within {left_s} s"
        why = "" if directive.save_reason is None else f": {directive.save_reason}"
        _log.warning("the operator requests a save%s%s", left, why)

    def _read_conditions(self) -> SaveConditions:
        """Return the state of the saves, for rank 0's policy."""
        claimed = self._companion.claimed_root
        disruptions = Disruptions()
        if claimed is not None and claimed.past is not None:
            disruptions = self._disruptions.count_until_now(claimed.claim.slot, claimed.past)
        return SaveConditions(
            saving=self._saver.in_flight is not None,
            cost=self._saver.cost,
            disruptions=disruptions,
        )


class DisruptionHistory:
    """Count the disruptions of a training and the time without any."""

    def __init__(self) -> None:
        self._claim: int | None = None
        self._since_s = 0.0

    def count_until_now(self, claim: int, past: RestartHistory) -> Disruptions:
        """Add the time since this process's `claim`, a log slot, to the `past` before. Without times nothing counts."""
        if claim != self._claim:
            self._claim, self._since_s = claim, time.monotonic()
        if past.over_s is None:
            return Disruptions()
        return Disruptions(count=past.restarts, over_s=past.over_s + time.monotonic() - self._since_s)
