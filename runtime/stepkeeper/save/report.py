"""Measure the cost of a save, and of its parts."""

import time
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Final

from stepkeeper.policy.save import SaveCost

__all__ = ["RecentCosts", "SaveClock", "SaveReport", "SaveState"]

_MAX_REPORTS: Final = 8
"""A save's cost is the median of this many newest saves, which ignores the compilation of the first one."""


class SaveState(StrEnum):
    """A save's progress, in order; a save that fails skips to FAILED."""

    TRANSFERRING = "Transferring"
    WRITING = "Writing"
    COMMITTING = "Committing"
    COMMITTED = "Committed"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """The report of one save on this rank, made once the save has ended.

    Times are in seconds of wall time. `stall_s`, `transfer_s`, `queue_s`, `persist_s` and `commit_s` follow each
    other and add up to `duration_s`; a part that the save didn't reach is zero.
    """

    step: int
    """The step that was saved."""

    sequence: int | None
    """The commit's slot in the log; None if the save failed."""

    uri: str | None
    """URI of the commit's folder; None if the save failed."""

    size_bytes: int
    """Bytes that this rank wrote."""

    total_bytes: int | None
    """Bytes that all ranks wrote together; None if the save failed."""

    stall_s: float
    """Time that the train thread waited: for an earlier save, if one was in the way, and for the snapshot."""

    transfer_s: float
    """Time from the snapshot until all of it was in host memory."""

    queue_s: float
    """Time from then until the writing began: the save before had to end, and the ranks compared their states."""

    persist_s: float
    """Time from then until this rank's share was durable."""

    commit_s: float
    """Time from then until the commit was in the log; this includes waiting for the slowest rank."""

    duration_s: float
    """Time from the call to the end."""

    error: str | None = None
    """Class and text of the error; None if the save was committed."""

    @property
    def committed(self) -> bool:
        """True if the save is a commit in the log."""
        return self.error is None


class SaveClock:
    """Note the times at which a save reaches each state, by this process's monotonic clock."""

    def __init__(self) -> None:
        self.began_s: Final = time.monotonic()
        self._released_s: float | None = None
        self._transferred_s: float | None = None
        self._reached_s: dict[SaveState, float] = {}

    def mark_released(self) -> None:
        """Note that the train thread continues."""
        self._released_s = time.monotonic()

    def mark_transferred(self) -> None:
        """Note that all of the snapshot is in host memory."""
        self._transferred_s = time.monotonic()

    def mark_state(self, state: SaveState) -> None:
        """Note that the save has reached `state`."""
        self._reached_s[state] = time.monotonic()

    def build_report(
        self,
        step: int,
        *,
        size_bytes: int,
        sequence: int | None = None,
        uri: str | None = None,
        total_bytes: int | None = None,
        error: BaseException | None = None,
    ) -> SaveReport:
        """Build the report of the save, which has ended just now. A part that it didn't reach took no time."""
        # A time that the save didn't reach is replaced by the next one.
        now_s = time.monotonic()
        released_s = self._released_s or now_s
        written_s = self._reached_s.get(SaveState.COMMITTING, now_s)
        writing_s = self._reached_s.get(SaveState.WRITING, written_s)
        # Copies may have reached the host before the train thread continued.
        transferred_s = max(released_s, self._transferred_s or writing_s)
        # After a failure, copies may still reach the host: then no time was spent in the queue.
        queue_s = max(0.0, writing_s - transferred_s)
        return SaveReport(
            step=step,
            sequence=sequence,
            uri=uri,
            size_bytes=size_bytes,
            total_bytes=total_bytes,
            stall_s=released_s - self.began_s,
            transfer_s=transferred_s - released_s,
            queue_s=queue_s,
            persist_s=written_s - writing_s,
            commit_s=now_s - written_s,
            duration_s=now_s - self.began_s,
            error=None if error is None else f"{type(error).__name__}: {error}",
        )


class RecentCosts:
    """The cost of a save, as the newest committed saves show it."""

    def __init__(self) -> None:
        self._reports: deque[SaveReport] = deque(maxlen=_MAX_REPORTS)
        self.cost: SaveCost | None = None
        """The cost of a save; None before the first commit."""

    def record(self, report: SaveReport) -> None:
        """Count a save that was committed."""
        self._reports.append(report)
        self.cost = SaveCost(
            stall_s=median(each.stall_s for each in self._reports),
            duration_s=median(each.duration_s for each in self._reports),
        )
