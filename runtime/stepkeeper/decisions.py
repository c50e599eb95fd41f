"""What is to be done after a step: nothing, a save, or a save and the end. The same answer in all ranks."""

import time
from typing import Final

from stepkeeper.agreement import STOP, StepAgreement
from stepkeeper.gang import Gang
from stepkeeper.policy import SavePolicy

__all__ = ["Decisions"]

_SAVE: Final = "save"


class Decisions:
    """The policy's word, and the wishes that came up in any rank. Asked by the train thread."""

    def __init__(self, policy: SavePolicy, gang: Gang) -> None:
        self._policy = policy
        self._gang = gang
        self._agreement = StepAgreement(gang)
        self._asked_for: str | None = None
        self._asked_step: int | None = None
        self._stop_step: int | None = None
        self._last_save_s = time.monotonic()

    @property
    def stop_step(self) -> int | None:
        """The step that all ranks stop at, once they have come to it."""
        return self._stop_step

    def start(self) -> None:
        """Wishes of other ranks are heard from now on."""
        self._agreement.start()

    def wish_stop(self) -> None:
        """All ranks will stop at one step. From any thread."""
        if self._stop_step is None:
            self._agreement.wish(STOP)

    def wish_save(self, request: str) -> None:
        """All ranks will save one step for `request`, once however often it is asked. From any thread."""
        if request != self._asked_for:
            self._asked_for = request
            self._agreement.wish(f"{_SAVE}/{request}")

    def stops(self, step: int) -> bool:
        """True if all ranks agreed to stop at `step` or before. Raises GangError if a rank is lost."""
        # At the stop step itself nothing new can come up, and the other ranks may be gone already.
        if step != self._stop_step:
            for wish in self._agreement.passed(step):
                if wish != STOP:
                    self._asked_step = step
                elif self._stop_step is None:
                    self._stop_step = step
        return self._stop_step is not None

    def due(self, step: int) -> bool:
        """True if `step` is to be saved whether or not anybody stops. Ask `stops` first.

        Asked again for the same step, the answer is the same until `save_begun`.
        """
        # Without the time that has passed, every rank comes to the same answer by itself.
        if step == self._asked_step or self._policy.due(step, 0.0):
            return True
        if self._gang.rank != 0 or not self._policy.due(step, time.monotonic() - self._last_save_s):
            return False
        if self._gang.world_size == 1:
            return True
        # Clocks differ between ranks: rank 0's counts, and all save at a step that they agree on.
        self._agreement.wish(_SAVE)
        return False

    def save_begun(self) -> None:
        """The policy's clock starts anew, and what was asked for is done."""
        self._asked_step = None
        self._last_save_s = time.monotonic()

    def close(self) -> None:
        """No wish is heard any more."""
        self._agreement.close()
