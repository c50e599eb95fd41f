"""Decide after each step whether to save it and whether to stop. All ranks come to the same decision."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from stepkeeper.coordination.agreement_rules import STOP, STOP_ASKED, STOPS, kills_for
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.step_agreement import StepAgreement
from stepkeeper.coordination.waits import Waits
from stepkeeper.policy.save import Disruptions, Moment, SaveCost, SavePolicy

__all__ = ["SaveConditions", "SaveDecider"]

_SAVE: Final = "save"
_POLICY: Final = "policy"
_REMEMBERED: Final = 64
"""The number of remembered requests to save. One that is repeated after as many others is carried out again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveConditions:
    """The state of a rank's saves. It may differ between ranks at the same step, so only rank 0 decides by its own."""

    saving: bool = False
    """True if a save is in flight."""

    cost: SaveCost | None = None
    """Cost of a recent save; None before the first commit."""

    disruptions: Disruptions = field(default_factory=Disruptions)
    """Disruptions of the training so far."""


class SaveDecider:
    """Decide by the save policy, and by the requests to save or stop of any rank.

    Any thread may make a request; all ranks then carry it out at the same step. The train thread calls the decisions
    after each step.
    """

    def __init__(
        self,
        policy: SavePolicy,
        rank_group: RankGroup,
        read_conditions: Callable[[], SaveConditions] = SaveConditions,
        waits: Waits | None = None,
        on_met: Callable[[], None] = lambda: None,
    ) -> None:
        """Start with no request. Rank 0 calls `read_conditions` for the state of the saves."""
        self._policy = policy
        self._rank_group = rank_group
        self._read_conditions = read_conditions
        self.agreement: Final = StepAgreement(rank_group, waits, on_met)
        self._answered: deque[str] = deque(maxlen=_REMEMBERED)
        """Requests to save whose step all ranks have reached. Several hosts may make the same one."""

        self._asked_step: int | None = None
        """The last step at which a request to save was due; None once a save has started."""

        self.stop_step: int | None = None
        """The stop step; None until this rank has reached it."""

        self._due_stops: set[str] = set()
        """STOP or STOP_ASKED, or both, once this rank has reached the stop step."""

        self._n_begun = 0
        self._last_save_s = time.monotonic()

    @property
    def kills(self) -> bool | None:
        """True if a process is killed after the agreed stop; None while no stop is agreed."""
        return kills_for(self._due_stops | {self.agreement.agreed_stop})

    def request_stop(self, *, asked: bool = False) -> None:
        """Make all ranks stop at one step; nothing is killed after it if `asked`. For any thread."""
        if self.stop_step is None:
            self.agreement.wish(STOP_ASKED if asked else STOP)

    def request_save(self, request: str) -> bool:
        """Make all ranks save one step for a request. Return False if one with this id was made. For any thread."""
        wish = f"{_SAVE}/{request}"
        return wish not in self._answered and self.agreement.wish(wish)

    def should_stop_at(self, step: int) -> bool:
        """Return True if all ranks agreed to stop at `step` or an earlier one. All call this after each step.

        Raises PeerLostError, and NoticeDeadlineError if the deadline came before all ranks had agreed.
        """
        # In a second call at the stop step there are no new wishes, and the other ranks may be gone already.
        if step != self.stop_step:
            for wish in self.agreement.pass_step(step):
                if wish in STOPS:
                    self._due_stops.add(wish)
                    self.stop_step = step if self.stop_step is None else self.stop_step
                elif not self._is_past(wish):
                    self._answered.append(wish)
                    self._asked_step = step
        return self.stop_step is not None

    def is_save_due(self, step: int, *, stopping: bool = False) -> bool:
        """Return True if `step` is to be saved. All ranks call this after each step, after `should_stop_at`.

        A repeated call for the same step returns the same until `on_save_started` is called. `stopping`: all
        ranks stop at this step, and it isn't being saved yet.
        """
        # By the step alone, without clocks and saves in flight, every rank gets the same answer by itself.
        if step == self._asked_step or self._policy.due(Moment(step=step, stopping=stopping)):
            return True
        if self._rank_group.rank != 0 or not self._policy.due(self._moment(step)):
            return False
        if self._rank_group.world_size == 1:
            return True
        # Rank 0's clock and saves count for all. Other ranks don't know them, so all agree on a later step to save.
        self.agreement.wish(self._policy_request)
        return False

    def on_save_started(self) -> None:
        """Restart the policy's clock, and mark the request to save as carried out, on all ranks together."""
        self._asked_step = None
        self._n_begun += 1
        self._last_save_s = time.monotonic()

    @property
    def _policy_request(self) -> str:
        """The policy's request. Its name has the number of saves before it."""
        return f"{_POLICY}/{self._n_begun}"

    def _is_past(self, wish: str) -> bool:
        """Return True if `wish` is answered: an earlier request, or the policy's from before the last save.

        All ranks return the same: a wish is due at the same step in all of them, after the same number of saves.
        """
        if wish.startswith(f"{_POLICY}/"):
            return wish != self._policy_request
        return wish in self._answered

    def _moment(self, step: int) -> Moment:
        seen = self._read_conditions()
        return Moment(
            step=step,
            since_save_s=time.monotonic() - self._last_save_s,
            saving=seen.saving,
            cost=seen.cost,
            disruptions=seen.disruptions,
        )
