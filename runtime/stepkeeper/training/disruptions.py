"""Keep count of how often the training was disrupted, hour by hour as it goes on."""

import time

from stepkeeper.log.restarts import Past
from stepkeeper.policy.save import Disruptions

__all__ = ["Experience"]


class Experience:
    """What is known of disruptions as a training goes on: each hour without one counts."""

    def __init__(self) -> None:
        self._claim: int | None = None
        self._since_s = 0.0

    def by_now(self, claim: int, past: Past) -> Disruptions:
        """`past` was what is known when `claim` was made. Nothing, where restarts are known and times are not."""
        if claim != self._claim:
            self._claim, self._since_s = claim, time.monotonic()
        if past.over_s is None:
            return Disruptions()
        return Disruptions(count=past.restarts, over_s=past.over_s + time.monotonic() - self._since_s)
