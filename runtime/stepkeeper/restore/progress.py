"""Tell how far a restore has come, while it takes long: the log, and the ranks that wait for this one."""

import time
from collections.abc import Callable
from typing import Final

from stepkeeper.coordination.rank_group import RankGroup, SoloRankGroup
from stepkeeper.loggers import logger
from stepkeeper.quantities import size_text

__all__ = ["RestoreProgress"]

_log: Final = logger("stepkeeper")
_EVERY_S: Final = 5.0
"""Seconds between two lines. A restore that takes less than that has none."""


class RestoreProgress:
    """Log one line for each 5 s that a rank reads, and tell the other ranks. Used by one thread."""

    def __init__(
        self,
        what: str,
        total_bytes: int,
        *,
        step: int | None = None,
        doing: str = "restoring",
        rank_group: RankGroup | None = None,
        began_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to tell.

        Args:
            what: Name of what is restored, for people.
            total_bytes: Number of bytes that this rank fills.
            step: The step that is restored, if it is one.
            doing: What is done with it.
            rank_group: The ranks that restore it together; None: this one alone.
            began_s: When the restore began, by the clock; None: now.
            clock: The time in seconds.

        """
        self._what, self._total_bytes, self._step, self._clock = what, total_bytes, step, clock
        self._doing, self._rank_group = doing, rank_group or SoloRankGroup()
        self._began_s = self._told_s = clock() if began_s is None else began_s
        self._told_bytes = 0

    def note_bytes(self, done_bytes: int) -> None:
        """Note how many bytes are in place, and tell it if the last line is 5 s old."""
        now_s = self._clock()
        if now_s - self._told_s < _EVERY_S:
            return
        self._told_s = now_s
        if done_bytes > self._told_bytes:
            self._rank_group.note_progress(done_bytes - self._told_bytes)
            self._told_bytes = done_bytes
        taken_s = now_s - self._began_s
        _log.info(
            "%s %s: %s of %s after %.0f s, %s/s",
            self._doing,
            self._what,
            size_text(done_bytes),
            size_text(self._total_bytes),
            taken_s,
            size_text(int(done_bytes / taken_s)),
            extra={"step": self._step},
        )
