"""Decide how long a process waits for another one, by the amount of data and by how far apart ranks may be.

All limits of a manager's waits come from here, except a notice's deadline, which ends every wait. A share is the part
of a save that one rank writes. Silence is time without progress.
"""

from typing import Final

__all__ = ["CLAIM_S", "ENTRY_S", "GROUP_TIMEOUT_S", "TimeLimits"]

GROUP_TIMEOUT_S: Final = 1800.0
"""torch's own default for process groups."""

_STARTS_APART: Final = 2.0
"""Before their first meeting, ranks may be apart by this multiple of the process group's timeout."""

_LEAST_SILENCE_S: Final = 900.0
"""The least limit on silence. It is longer than any store's retries, so that a store that doesn't answer is reported
by its own error."""

_STORE_ANSWER_S: Final = 300.0
"""The time for an answer of the ranks' store, which needs no Python thread: even a busy rank 0 answers."""

ENTRY_S: Final = _LEAST_SILENCE_S
"""Seconds that the companion has for an entry of the log."""

CLAIM_S: Final = 3600.0
"""Seconds that the companion has for a claim or a request about the log. These wait for the upkeep after earlier
commits, such as many deletions.
"""

_SLOWEST_BYTES_PER_S: Final = 20e6
"""The speed below which a share counts as stuck: at its end, a file system makes all of it durable in silence."""

_OTHERS_SLOWER_BY: Final = 2.0
"""Another rank's share may be silent for this multiple of this rank's limit. Each rank limits its own share."""


class TimeLimits:
    """The limits of one rank's waits. Any thread may call it."""

    def __init__(self, group_timeout_s: float = GROUP_TIMEOUT_S) -> None:
        """Start with ranks that haven't met. The group's timeout is the training's limit for collectives."""
        self._group_s: Final = group_timeout_s
        self._have_met = False

    @property
    def start_s(self) -> float:
        """Seconds by which ranks may start apart."""
        return _STARTS_APART * self._group_s

    @property
    def apart_s(self) -> float:
        """Seconds by which ranks may reach a meeting, such as a save, apart.

        In a save or a restore, a rank whose heartbeats stop for as long counts as lost: all of its threads hang.
        """
        return self._group_s if self._have_met else self.start_s

    @property
    def store_answer_s(self) -> float:
        """Seconds that the ranks' store has for an answer."""
        return min(_STORE_ANSWER_S, self._group_s)

    @property
    def silence_s(self) -> float:
        """Seconds after which a restore is given up if no rank makes progress."""
        return max(_LEAST_SILENCE_S, self._group_s)

    def share_silence_s(self, size_bytes: int) -> float:
        """Return the seconds without progress after which a share of `size_bytes` is given up."""
        return max(_LEAST_SILENCE_S, size_bytes / _SLOWEST_BYTES_PER_S)

    def vote_s(self, size_bytes: int) -> float:
        """Return the seconds of silence after which a rank with a share of `size_bytes` gives up another rank's vote.

        A rank votes once its own share is written.
        """
        return _OTHERS_SLOWER_BY * self.share_silence_s(size_bytes)

    def transfer_s(self, size_bytes: int) -> float:
        """Return the seconds that a transfer of `size_bytes` from the devices to the host may take without progress.

        The devices first finish their present work, which may wait for another rank. Then the pieces arrive one by one.
        """
        return max(self._group_s, size_bytes / _SLOWEST_BYTES_PER_S)

    def note_meeting(self) -> None:
        """Record that all ranks have met."""
        self._have_met = True
