"""Log how far a restore has come, while it takes long."""

import time
from collections.abc import Callable
from typing import Final

from stepkeeper.loggers import logger
from stepkeeper.quantities import size_text

__all__ = ["RestoreProgress"]

_log: Final = logger("stepkeeper")
_EVERY_S: Final = 5.0
"""Seconds between two lines. A restore that takes less than that has none."""


class RestoreProgress:
    """Log one line for each 5 s that a rank reads. Used by one thread."""

    def __init__(
        self,
        what: str,
        total_bytes: int,
        *,
        step: int | None = None,
        doing: str = "restoring",
        note_moved: Callable[[int], None] = lambda _n_bytes: None,
        began_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin.

        Args:
            what: Name of what is restored, for people.
            total_bytes: Number of bytes that this rank fills.
            step: The step that is restored, if it is one.
            doing: What is done with it.
            note_moved: Called with how many more bytes are in place.
            began_s: When the restore began, by the clock; None: now.
            clock: The time in seconds.

        """
        self._what, self._total_bytes, self._step, self._clock = what, total_bytes, step, clock
        self._doing, self._note_moved = doing, note_moved
        self._began_s = self._logged_s = clock() if began_s is None else began_s
        self._done_bytes = 0

    def note_bytes(self, done_bytes: int) -> None:
        """Note how many bytes are in place, and log it if the last line is 5 s old."""
        self._note_moved(done_bytes - self._done_bytes)
        self._done_bytes = done_bytes
        now_s = self._clock()
        if now_s - self._logged_s < _EVERY_S:
            return
        self._logged_s = now_s
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
