"""What is to be done after a step: nothing, a save, or a save and the end. The same answer in all ranks."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.step_agreement import STOP, StepAgreement
from stepkeeper.policy.save import Disruptions, Moment, SaveCost, SavePolicy

__all__ = ["SaveConditions", "SaveDecider"]

_SAVE: Final = "save"
_POLICY: Final = "policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveConditions:
    """What rank 0 alone knows of the saves; another rank may see it otherwise at the same step."""

    saving: bool = False
    cost: SaveCost | None = None
    disruptions: Disruptions = field(default_factory=Disruptions)


class SaveDecider:
    """The policy's word, and the wishes that came up in any rank. Asked by the train thread."""

    def __init__(
        self,
        policy: SavePolicy,
        rank_group: RankGroup,
        read_conditions: Callable[[], SaveConditions] = SaveConditions,
    ) -> None:
        self._policy = policy
        self._rank_group = rank_group
        self._read_conditions = read_conditions
        self._agreement = StepAgreement(rank_group)
        self._asked_for: str | None = None
        self._asked_step: int | None = None
        self._stop_step: int | None = None
        self._n_begun = 0
        self._last_save_s = time.monotonic()

    @property
    def stop_step(self) -> int | None:
        """The step that all ranks stop at, once they have come to it."""
        return self._stop_step

    def start(self) -> None:
        """Wishes of other ranks are heard from now on."""
        self._agreement.start()

    def request_stop(self) -> None:
        """All ranks will stop at one step. From any thread."""
        if self._stop_step is None:
            self._agreement.wish(STOP)

    def request_save(self, request: str) -> None:
        """All ranks will save one step for `request`, once however often it is asked. From any thread."""
        if request != self._asked_for:
            self._asked_for = request
            self._agreement.wish(f"{_SAVE}/{request}")

    def should_stop_at(self, step: int) -> bool:
        """True if all ranks agreed to stop at `step` or before. Raises PeerLostError if a rank is lost."""
        # At the stop step itself nothing new can come up, and the other ranks may be gone already.
        if step != self._stop_step:
            for wish in self._agreement.pass_step(step):
                if wish == STOP:
                    self._stop_step = step if self._stop_step is None else self._stop_step
                elif not self._is_past(wish):
                    self._asked_step = step
        return self._stop_step is not None

    def is_save_due(self, step: int, *, stopping: bool = False) -> bool:
        """True if `step` is to be saved; `stopping`: as the one that all ranks stop at. Ask `stops` first.

        Asked again for the same step, the answer is the same until `on_save_started`.
        """
        # Without clocks and saves in flight, every rank comes to the same answer by itself.
        if step == self._asked_step or self._policy.due(Moment(step=step, stopping=stopping)):
            return True
        if self._rank_group.rank != 0 or not self._policy.due(self._moment(step)):
            return False
        if self._rank_group.world_size == 1:
            return True
        # These differ between ranks: rank 0's count, and all save at a step that they agree on.
        self._agreement.wish(self._policy_request)
        return False

    def on_save_started(self) -> None:
        """The policy's clock starts anew, and what was asked for is done. Ranks: all, at the same steps."""
        self._asked_step = None
        self._n_begun += 1
        self._last_save_s = time.monotonic()

    @property
    def _policy_request(self) -> str:
        """It names the saves that it comes after."""
        return f"{_POLICY}/{self._n_begun}"

    def _is_past(self, wish: str) -> bool:
        """True of what the policy wished before the last save: its clock started anew with that one.

        All ranks come to the same answer: a wish is due at the same step in all, and before it all began as many saves.
        """
        return wish.startswith(f"{_POLICY}/") and wish != self._policy_request

    def _moment(self, step: int) -> Moment:
        seen = self._read_conditions()
        return Moment(
            step=step,
            since_save_s=time.monotonic() - self._last_save_s,
            saving=seen.saving,
            cost=seen.cost,
            disruptions=seen.disruptions,
        )

    def close(self) -> None:
        """No wish is heard any more."""
        self._agreement.close()
