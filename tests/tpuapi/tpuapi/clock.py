"""The service's clock: stepped by a test, or real time at some speed."""

import time
from datetime import UTC, datetime
from typing import Protocol

START = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


class Clock(Protocol):
    def now(self) -> float:
        """Return seconds since 1970."""
        ...


class SteppedClock:
    """Stand still until somebody steps it."""

    def __init__(self, start: float = START) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def step(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: It would run backwards.
        """
        if seconds < 0:
            raise ValueError(f"time can't run backwards by {-seconds} s")
        self._now += seconds


class ScaledClock:
    """Start at the machine's time, and run `speed` times as fast."""

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed
        self._start = time.time()
        self._started = time.monotonic()

    def now(self) -> float:
        return self._start + (time.monotonic() - self._started) * self._speed

    def real_s(self, seconds: float) -> float:
        """Convert seconds of this clock into the machine's."""
        return seconds / self._speed
