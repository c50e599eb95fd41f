"""Limit how long a rank's share of a save may stand still, by how fast the shares before it were written."""

from typing import Final

__all__ = ["ShareSpeed"]

_LEAST_SILENCE_S: Final = 900.0
"""Longer than any store's requests are retried: a store that gives no answer is told as such, by its own error."""

_UNMEASURED_BYTES_PER_S: Final = 20e6
_SLOWER_BY: Final = 4.0
"""How many times slower than measured a share may be. At its end a file system makes all of it durable, and shows no
progress meanwhile.
"""


class ShareSpeed:
    """Measure the speed of shares, and derive the limit of the next one."""

    def __init__(self) -> None:
        self._bytes_per_s: float | None = None

    def record_share(self, size_bytes: int, duration_s: float) -> None:
        """Note that a share of `size_bytes` was durable after `duration_s` seconds."""
        if size_bytes > 0 and duration_s > 0:
            self._bytes_per_s = size_bytes / duration_s

    def silence_limit_s(self, size_bytes: int) -> float:
        """Return how long a share of `size_bytes` may make no progress before it is given up, in seconds."""
        speed = _UNMEASURED_BYTES_PER_S if self._bytes_per_s is None else self._bytes_per_s / _SLOWER_BY
        return max(_LEAST_SILENCE_S, size_bytes / speed)
