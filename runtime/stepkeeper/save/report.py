"""What one save cost, and where the time went."""

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

__all__ = ["SaveClock", "SaveReport", "SaveState"]


class SaveState(StrEnum):
    TRANSFERRING = "Transferring"
    WRITING = "Writing"
    COMMITTING = "Committing"
    COMMITTED = "Committed"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """One save of this rank, once it has ended."""

    step: int
    sequence: int | None
    """Its slot in the log; None: it failed."""

    uri: str | None
    size_bytes: int
    """What this rank had to write."""

    total_bytes: int | None
    """What all ranks wrote; None: it failed."""

    stall_s: float
    """How long the train thread waited: for an earlier save, if one was in the way, and for the snapshot."""

    transfer_s: float
    """From the snapshot until all of it was in host memory."""

    queue_s: float
    """Until it was written: the save before had ended by then, and the ranks had compared their states."""

    persist_s: float
    """Until this rank's share was durable."""

    commit_s: float
    """Until the commit was in the log; the slowest rank is waited for."""

    duration_s: float
    """From the call to the end."""

    error: str | None = None

    @property
    def committed(self) -> bool:
        return self.error is None


class SaveClock:
    """When a save came to which state, by this process's monotonic clock."""

    def __init__(self) -> None:
        self.began_s: Final = time.monotonic()
        self._stalled_s: float | None = None
        self._transferred_s: float | None = None
        self._reached_s: dict[SaveState, float] = {}

    def released(self) -> None:
        """The train thread goes on."""
        self._stalled_s = time.monotonic()

    def transferred(self) -> None:
        """All of the snapshot is in host memory."""
        self._transferred_s = time.monotonic()

    def reached(self, state: SaveState) -> None:
        """The save has come as far as `state`."""
        self._reached_s[state] = time.monotonic()

    @property
    def stall_s(self) -> float:
        return 0.0 if self._stalled_s is None else self._stalled_s - self.began_s

    def report(
        self,
        step: int,
        *,
        size_bytes: int,
        sequence: int | None = None,
        uri: str | None = None,
        total_bytes: int | None = None,
        error: BaseException | None = None,
    ) -> SaveReport:
        """The save has ended just now. A part that it didn't come to took no time."""
        now_s = time.monotonic()
        released_s = self._stalled_s or now_s
        written_s = self._reached_s.get(SaveState.COMMITTING, now_s)
        writing_s = self._reached_s.get(SaveState.WRITING, written_s)
        transferred_s = self._transferred_s or writing_s
        return SaveReport(
            step=step,
            sequence=sequence,
            uri=uri,
            size_bytes=size_bytes,
            total_bytes=total_bytes,
            stall_s=released_s - self.began_s,
            transfer_s=transferred_s - released_s,
            queue_s=writing_s - transferred_s,
            persist_s=written_s - writing_s,
            commit_s=now_s - written_s,
            duration_s=now_s - self.began_s,
            error=None if error is None else f"{type(error).__name__}: {error}",
        )
