"""Decide how long a process waits for another one: by how much there is to move, and by how far apart ranks may be.

All limits of a manager's waits come from here, except for those of a notice, which end every wait earlier.
"""

from typing import Final

__all__ = ["CLAIM_S", "ENTRY_S", "GROUP_TIMEOUT_S", "TimeLimits"]

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

ENTRY_S: Final = _LEAST_SILENCE_S
"""Seconds that the companion has for an entry of the log."""

CLAIM_S: Final = 3600.0
"""Seconds that the companion has for a claim, or for what it is asked about the log. That waits for the work after
earlier commits, such as many deletions.
"""

_SLOWEST_BYTES_PER_S: Final = 20e6
"""At a share's end a file system makes all of it durable, and shows no progress meanwhile."""

_OTHERS_SLOWER_BY: Final = 2.0
"""How many times longer than this rank's share another rank's may stand still. Each rank limits its own."""


class TimeLimits:
    """The limits of one rank's waits. Any thread may call it."""

    def __init__(self, group_timeout_s: float = GROUP_TIMEOUT_S) -> None:
        """Assume that the ranks haven't met yet.

        Args:
            group_timeout_s: The process group's timeout: how long a rank may keep the others waiting in a collective,
                as the training has chosen.

        """
        self._group_s: Final = group_timeout_s
        self._have_met = False

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
        return self._group_s if self._have_met else self.start_s

    @property
    def store_answer_s(self) -> float:
        """Seconds that the ranks' store has for an answer."""
        return min(_STORE_ANSWER_S, self._group_s)

    @property
    def silence_s(self) -> float:
        """Seconds that a restore may make no progress on any rank."""
        return max(_LEAST_SILENCE_S, self._group_s)

    def share_silence_s(self, size_bytes: int) -> float:
        """Return how long a share of `size_bytes` may make no progress before it is given up, in seconds."""
        return max(_LEAST_SILENCE_S, size_bytes / _SLOWEST_BYTES_PER_S)

    def vote_s(self, size_bytes: int) -> float:
        """Return how long a rank whose share has `size_bytes` waits for another one's, in seconds."""
        return _OTHERS_SLOWER_BY * self.share_silence_s(size_bytes)

    def transfer_s(self, size_bytes: int) -> float:
        """Return how long nothing of `size_bytes` may come from the devices to the host, in seconds.

        The devices finish first what they are at, which may wait for another rank. Then the pieces come one by one.
        """
        return max(self._group_s, size_bytes / _SLOWEST_BYTES_PER_S)

    def note_meeting(self) -> None:
        """Note that all ranks have met."""
        self._have_met = True
