"""Tell the other ranks now and then that a save of this one makes progress."""

import time
from collections.abc import Callable
from typing import Final

from stepkeeper.coordination.rank_group import RankGroup

__all__ = ["TOLD_EVERY_S", "ProgressTeller"]

TOLD_EVERY_S: Final = 5.0
"""The interval at which a rank tells the others."""


class ProgressTeller:
    """Follow how many bytes one part of a save has moved. Used by one thread."""

    def __init__(
        self, rank_group: RankGroup, read_moved: Callable[[], int], note_progress: Callable[[], None]
    ) -> None:
        """Begin now.

        Args:
            rank_group: All ranks.
            read_moved: Returns how many bytes were moved since the beginning.
            note_progress: Called where some were, for the waits of this process.

        """
        self._rank_group = rank_group
        self._read_moved = read_moved
        self._note_progress = note_progress
        self._told_s = time.monotonic()
        self._moved_bytes = self._told_bytes = 0

    def has_moved(self) -> bool:
        """Return True if bytes were moved since the last call, and tell the other ranks now and then."""
        before, self._moved_bytes = self._moved_bytes, self._read_moved()
        if self._moved_bytes == before:
            return False
        self._note_progress()
        if time.monotonic() >= self._told_s + TOLD_EVERY_S:
            self._rank_group.note_progress(max(1, self._moved_bytes - self._told_bytes))
            self._told_s, self._told_bytes = time.monotonic(), self._moved_bytes
        return True
