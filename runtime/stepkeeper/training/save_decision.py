"""Decide after each step whether to save it and whether to stop. All ranks come to the same decision."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from stepkeeper.coordination.agreement_rules import kills_for
from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.step_agreement import STOP, STOP_ASKED, STOPS, StepAgreement
from stepkeeper.coordination.waits import Waits
from stepkeeper.policy.save import Disruptions, Moment, SaveCost, SavePolicy

__all__ = ["SaveConditions", "SaveDecider"]

_SAVE: Final = "save"
_POLICY: Final = "policy"
_REMEMBERED: Final = 64
"""The number of remembered requests. A request that is repeated after more others is carried out again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveConditions:
    """The state of the saves in rank 0. It may differ between ranks at the same step, so only rank 0 decides by it."""

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
        self._agreement = StepAgreement(rank_group, waits, on_met)
        self._answered: deque[str] = deque(maxlen=_REMEMBERED)
        """Requests that all ranks have reached. Several hosts may make the same one, each when it gets the reason."""

        self._asked_step: int | None = None
        self._stop_step: int | None = None
        self._due_stops: set[str] = set()
        self._n_begun = 0
        self._last_save_s = time.monotonic()

    @property
    def stop_step(self) -> int | None:
        """The stop step; None until this rank has reached it."""
        return self._stop_step

    @property
    def stop_is_agreed(self) -> bool:
        """True if all ranks have agreed on a stop step that this one hasn't reached."""
        return self._agreement.agreed_stop is not None

    @property
    def received_early_stop(self) -> bool:
        """True if another rank got a notice before all ranks had started."""
        return self._agreement.received_early_stop

    @property
    def kills(self) -> bool | None:
        """True if a process is killed after the agreed stop; None while no stop is agreed."""
        return kills_for(self._due_stops | {self._agreement.agreed_stop})

    def start(self) -> None:
        """Listen to the requests of other ranks from now on."""
        self._agreement.start()

    def request_stop(self, *, asked: bool = False) -> None:
        """Make all ranks stop at one step; nothing is killed after it if `asked`. For any thread."""
        if self._stop_step is None:
            self._agreement.wish(STOP_ASKED if asked else STOP)

    def request_save(self, request: str) -> bool:
        """Make all ranks save one step for a request. Return False if its id is known. For any thread."""
        wish = f"{_SAVE}/{request}"
        return wish not in self._answered and self._agreement.wish(wish)

    def should_stop_at(self, step: int) -> bool:
        """Return True if all ranks agreed to stop at `step` or an earlier one. All call this after each step.

        Raises PeerLostError, and NoticeDeadlineError if the deadline came before all ranks had agreed.
        """
        # At the stop step itself there are no new wishes, and the other ranks may be gone already.
        if step != self._stop_step:
            for wish in self._agreement.pass_step(step):
                if wish in STOPS:
                    self._due_stops.add(wish)
                    self._stop_step = step if self._stop_step is None else self._stop_step
                elif not self._is_past(wish):
                    self._answered.append(wish)
                    self._asked_step = step
        return self._stop_step is not None

    def is_save_due(self, step: int, *, stopping: bool = False) -> bool:
        """Return True if `step` is to be saved. All ranks call this after each step, after `should_stop_at`.

        A repeated call for the same step returns the same until `on_save_started` is called. `stopping`: all
        ranks stop at this step, and it isn't being saved yet.
        """
        # Without clocks and saves in flight, every rank gets the same answer by itself.
        if step == self._asked_step or self._policy.due(Moment(step=step, stopping=stopping)):
            return True
        if self._rank_group.rank != 0 or not self._policy.due(self._moment(step)):
            return False
        if self._rank_group.world_size == 1:
            return True
        # These differ between ranks. Rank 0's values count, and all ranks agree on the step to save.
        self._agreement.wish(self._policy_request)
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

        All ranks return the same: a wish is due at the same step in all of them, after the same number of
        saves.
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

    def await_stops(self, timeout_s: float) -> None:
        """Wait until all ranks have reached the stop step. Raises the errors of `StepAgreement.await_stops`."""
        self._agreement.await_stops(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Stop listening to requests, within `timeout_s` seconds."""
        self._agreement.close(timeout_s)
