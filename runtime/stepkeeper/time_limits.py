"""Decide how long a process waits for another one: by how fast things have gone, and by how far apart ranks may be.

All limits of a manager's waits come from here, except for those of a notice, which end every wait earlier.
"""

from typing import Final

__all__ = ["GROUP_TIMEOUT_S", "TimeLimits"]

GROUP_TIMEOUT_S: Final = 1800.0
"""torch's own default for process groups."""

_STARTS_APART: Final = 2.0
"""How many times the process group's timeout ranks may be apart before they have met for the first time."""

_LEAST_SILENCE_S: Final = 900.0
"""Longer than any store's requests are retried: a store that gives no answer is told as such, by its own error."""

_STORE_ANSWER_S: Final = 300.0
"""No Python runs where the ranks' store is, so a rank 0 that computes answers all the same: one that doesn't stands
still, or its host is gone.
"""

_LEAST_CLAIM_S: Final = 3600.0
"""A claim waits for the work after earlier commits, such as many deletions, of which earlier claims tell nothing."""

_UNMEASURED_BYTES_PER_S: Final = 20e6
_TELLING_BYTES: Final = 64 << 20
"""Fewer bytes tell no speed: most of their time is somebody else's."""

_SLOWER_BY: Final = 4.0
"""How many times slower than measured something may be. At a share's end a file system makes all of it durable, and
shows no progress meanwhile.
"""

_OTHERS_SLOWER_BY: Final = 2.0
"""How many times longer than this rank's share another rank's may stand still. Each rank limits its own."""


class TimeLimits:
    """Measure one rank's waits and transfers, and derive the limits of the next ones. Any thread may call it."""

    def __init__(self, group_timeout_s: float = GROUP_TIMEOUT_S) -> None:
        """Know of no measurement yet.

        Args:
            group_timeout_s: The process group's timeout: how long a rank may keep the others waiting in a collective,
                as the training has chosen.

        """
        self._group_s: Final = group_timeout_s
        self._longest_meeting_s: float | None = None
        self._longest_claim_s = 0.0
        self._share_bytes_per_s: float | None = None
        self._transfer_bytes_per_s: float | None = None

    @property
    def start_s(self) -> float:
        """Seconds by which ranks may start apart."""
        return _STARTS_APART * self._group_s

    @property
    def apart_s(self) -> float:
        """Seconds by which ranks may come apart to where they meet, such as a save.

        A rank in a save or a restore may be without a heartbeat for as long. What it writes may stand still for longer,
        and it ends that itself. But where all of its threads stand still, so does its training.
        """
        if self._longest_meeting_s is None:
            return self.start_s
        return max(self._group_s, _SLOWER_BY * self._longest_meeting_s)

    @property
    def store_answer_s(self) -> float:
        """Seconds that the ranks' store has for an answer."""
        return min(_STORE_ANSWER_S, self._group_s)

    @property
    def silence_s(self) -> float:
        """Seconds that a restore may make no progress on any rank."""
        return max(_LEAST_SILENCE_S, self._group_s)

    @property
    def entry_s(self) -> float:
        """Seconds that the companion has for an entry of the log."""
        return _LEAST_SILENCE_S

    @property
    def claim_s(self) -> float:
        """Seconds that the companion has for a claim, or for what it is asked about the log."""
        return max(_LEAST_CLAIM_S, _SLOWER_BY * self._longest_claim_s)

    def share_silence_s(self, size_bytes: int) -> float:
        """Return how long a share of `size_bytes` may make no progress before it is given up, in seconds."""
        return max(_LEAST_SILENCE_S, _limit_s(size_bytes, self._share_bytes_per_s))

    def vote_s(self, size_bytes: int) -> float:
        """Return how long a rank whose share has `size_bytes` waits for another one's, in seconds."""
        return _OTHERS_SLOWER_BY * self.share_silence_s(size_bytes)

    def transfer_s(self, size_bytes: int) -> float:
        """Return how long nothing of `size_bytes` may come from the devices to the host, in seconds.

        The devices finish first what they are at, which may wait for another rank. Then the pieces come one by one.
        """
        return max(self._group_s, _limit_s(size_bytes, self._transfer_bytes_per_s))

    def record_meeting(self, waited_s: float) -> None:
        """Note that all ranks have met, and that this one waited `waited_s` seconds for them."""
        self._longest_meeting_s = max(waited_s, self._longest_meeting_s or 0.0)

    def record_claim(self, duration_s: float) -> None:
        """Note that a claim took `duration_s` seconds."""
        self._longest_claim_s = max(duration_s, self._longest_claim_s)

    def record_share(self, size_bytes: int, duration_s: float) -> None:
        """Note that a share of `size_bytes` was durable after `duration_s` seconds."""
        if size_bytes >= _TELLING_BYTES and duration_s > 0:
            self._share_bytes_per_s = size_bytes / duration_s

    def record_transfer(self, size_bytes: int, duration_s: float) -> None:
        """Note that `size_bytes` came from the devices in `duration_s` seconds."""
        if size_bytes >= _TELLING_BYTES and duration_s > 0:
            self._transfer_bytes_per_s = size_bytes / duration_s


def _limit_s(size_bytes: int, measured_bytes_per_s: float | None) -> float:
    if measured_bytes_per_s is None:
        return size_bytes / _UNMEASURED_BYTES_PER_S
    return _SLOWER_BY * size_bytes / measured_bytes_per_s
