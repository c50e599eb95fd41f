"""Count how often the training was disrupted, and in how long a time."""

import time

from stepkeeper.log.store_times import RestartHistory
from stepkeeper.policy.save import Disruptions

__all__ = ["DisruptionHistory"]


class DisruptionHistory:
    """Know the disruptions of a training while it goes on: each hour without one counts."""

    def __init__(self) -> None:
        self._claim: int | None = None
        self._since_s = 0.0

    def count_until_now(self, claim: int, past: RestartHistory) -> Disruptions:
        """Add the time since `claim` was made to the past that was read at that claim.

        Args:
            claim: Log slot of this process's claim.
            past: Restarts before it, and over how many seconds.

        Returns:
            The disruptions so far; zero if restarts are known but their times are not.

        """
        if claim != self._claim:
            self._claim, self._since_s = claim, time.monotonic()
        if past.over_s is None:
            return Disruptions()
        return Disruptions(count=past.restarts, over_s=past.over_s + time.monotonic() - self._since_s)
