"""Bound what a stranger can make the operator ask the API server for."""

from collections.abc import Callable

__all__ = ["Allowance"]

_MAX_NAMES = 4096


class Allowance:
    """Allow so many requests for each name, and one more each `refill_s` seconds.

    Names beyond a bound share one allowance, so that many names take no more memory than that.
    """

    def __init__(self, n: int, refill_s: float, clock: Callable[[], float]) -> None:
        self._n = n
        self._refill_s = refill_s
        self._clock = clock
        self._full_at: dict[str, float] = {}
        """Time at which a name has all its requests again. A name that has them isn't kept."""

    def take(self, name: str) -> bool:
        """Use up one request of the name. Return False if none is left now."""
        name, now = self._bounded(name), self._clock()
        full_at = max(now, self._full_at.get(name, now))
        if full_at - now > (self._n - 1) * self._refill_s:
            return False
        self._full_at[name] = full_at + self._refill_s
        return True

    def give_back(self, name: str) -> None:
        """Undo one `take` of the name: it was no stranger."""
        name = self._bounded(name)
        if name in self._full_at:
            self._full_at[name] -= self._refill_s

    def _bounded(self, name: str) -> str:
        if name in self._full_at or len(self._full_at) < _MAX_NAMES:
            return name
        now = self._clock()
        self._full_at = {known: full_at for known, full_at in self._full_at.items() if full_at > now}
        return name if len(self._full_at) < _MAX_NAMES else ""
