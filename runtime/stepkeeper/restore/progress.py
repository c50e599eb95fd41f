"""Log the progress of a restore that takes long."""

import time
from typing import Final

from stepkeeper.loggers import logger
from stepkeeper.quantities import size_text

__all__ = ["RestoreProgress"]

_log: Final = logger("stepkeeper")
_EVERY_S: Final = 5.0
"""Seconds between two lines. A restore that takes less than that has none."""


class RestoreProgress:
    """Log a line every 5 s while a rank reads. Used by one thread."""

    def __init__(self, what: str, *, step: int | None = None, doing: str = "restoring") -> None:
        """Begin now. `what` names the restored checkpoint, and `doing` the activity, for people."""
        self.what: Final = what
        self._step, self._doing = step, doing
        self._began_s = self._logged_s = time.monotonic()
        self.total_bytes = 0
        """Number of bytes that this rank fills."""

    def note_bytes(self, done_bytes: int) -> None:
        """Note how many bytes are in place, and log it if the last line is 5 s old."""
        now_s = time.monotonic()
        if now_s - self._logged_s < _EVERY_S:
            return
        self._logged_s = now_s
        taken_s = now_s - self._began_s
        _log.info(
            "%s %s: %s of %s after %.0f s, %s/s",
            self._doing,
            self.what,
            size_text(done_bytes),
            size_text(self.total_bytes),
            taken_s,
            size_text(int(done_bytes / taken_s)),
            extra={"step": self._step},
        )
