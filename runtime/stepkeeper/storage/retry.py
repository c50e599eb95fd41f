"""Retry requests to a store, after pauses that grow."""

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from stepkeeper.errors import TransientStorageError
from stepkeeper.loggers import logger

__all__ = ["DEFAULT_PATIENCE", "Patience"]

T = TypeVar("T")
_log: Final = logger(__name__)

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 8.0
_TRIES_S: Final = 60.0
"""The seconds that all tries together may take beyond the pauses."""

_WARN_AFTER_S: Final = 5.0
_WARN_EVERY_S: Final = 30.0
"""The seconds between two warnings, however many threads wait for an answer."""

_JITTER: Final = random.Random()  # noqa: S311  # no secret
"""A separate generator: retries must not change the numbers that a training draws from the module's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """A limit on the retries of a request. Pauses have a jitter, so that many ranks don't retry at the same time.

    If the tries themselves take long (stuck requests), retrying ends up to a minute later.
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
        """Call `operation`, again after each TransientStorageError, and return its result.

        Raises TransientStorageError once patience runs out, and every other error at once. Long outages are logged.
        """
        begun_s = time.monotonic()
        for pause_s in self.pauses_s():
            try:
                return operation()
            except TransientStorageError as error:
                _warnings.warn(error, time.monotonic() - begun_s, self.total_s)
                self.sleep(pause_s)
        return operation()


class _Warnings:
    """Warn of a store that gives no answer for a while. Two threads at once may both warn."""

    def __init__(self) -> None:
        self._warned_s = -math.inf

    def warn(self, error: TransientStorageError, waited_s: float, total_s: float) -> None:
        now_s = time.monotonic()
        if waited_s < _WARN_AFTER_S or now_s - self._warned_s < _WARN_EVERY_S:
            return
        self._warned_s = now_s
        _log.warning(
            "the store has given no answer for %.0f s; retrying for up to %.0f s: %s",
            waited_s,
            total_s,
            error,
        )


_warnings: Final = _Warnings()
DEFAULT_PATIENCE: Final = Patience()
