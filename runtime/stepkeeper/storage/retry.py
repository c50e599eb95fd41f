"""Ask a store again after pauses that grow."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from stepkeeper.errors import TransientStorageError

__all__ = ["DEFAULT_PATIENCE", "Patience"]

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 8.0
_TRIES_S: Final = 60.0
"""The seconds that all tries together may take beyond the pauses."""

_JITTER: Final = random.Random()  # noqa: S311  # no secret
"""A generator of our own: a training that draws from the module's must not draw others because a store was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """A limit to how long an answer is waited for. The jitter is equal, so that many ranks don't come back at once.

    Tries that take long by themselves (requests that get stuck) are given up a minute later.
    """

    total_s: float = 90.0
    sleep: Callable[[float], None] = time.sleep

    def pauses_s(self) -> Iterator[float]:
        """Yield the pauses to sleep between tries, about `total_s` in all; none if `total_s` is 0."""
        begun_s = time.monotonic()
        slept_s, pause_s = 0.0, _FIRST_PAUSE_S
        while slept_s < self.total_s and time.monotonic() < begun_s + self.total_s + _TRIES_S:
            jittered_s = pause_s * _JITTER.uniform(0.5, 1.0)
            yield jittered_s
            slept_s += jittered_s
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def retry(self, operation: Callable[[], T]) -> T:
        """Call `operation`, again after each TransientStorageError, and return what it returns.

        Raises TransientStorageError once patience is at an end, and every other error at once.
        """
        for pause_s in self.pauses_s():
            try:
                return operation()
            except TransientStorageError:
                self.sleep(pause_s)
        return operation()


DEFAULT_PATIENCE: Final = Patience()
