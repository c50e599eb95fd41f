"""Tell when a step takes far longer than the ones before it. Pure."""

from dataclasses import dataclass, replace
from typing import Final, Self

__all__ = ["Pace"]

_FACTOR: Final = 10.0
_LEAST_GAPS: Final = 2
"""The first steps compile, and tell nothing of those that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The durations of a training's steps, and the time since the last of them."""

    step: int | None = None
    """The last finished step; None while no steps are made, as in a restore."""

    since_s: float = 0.0
    """When that was."""

    n_gaps: int = 0
    longest_s: float = 0.0
    n_noted: int = 0
    """How often the present step was noted as slow: each time it may take twice as long before the next."""

    def see(self, step: int | None, now_s: float) -> Self:
        """Return what is known once `step` is the last finished one."""
        if step == self.step:
            return self
        if step is None or self.step is None:
            return replace(self, step=step, since_s=now_s, n_noted=0)
        longest_s = max(self.longest_s, now_s - self.since_s)
        return replace(self, step=step, since_s=now_s, n_gaps=self.n_gaps + 1, longest_s=longest_s, n_noted=0)

    def slow_from_s(self, least_s: float) -> float | None:
        """Return the time from which the present step is slow; None while nothing is known of steps.

        Args:
            least_s: Seconds that any step may take.

        """
        if self.step is None or self.n_gaps < _LEAST_GAPS:
            return None
        return self.since_s + max(least_s, _FACTOR * self.longest_s) * 2.0**self.n_noted

    def note(self) -> Self:
        """Return what is known once the present step was noted as slow."""
        return replace(self, n_noted=self.n_noted + 1)
