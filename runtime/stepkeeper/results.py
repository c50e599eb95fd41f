"""Define the values that a manager's methods return."""

from dataclasses import dataclass

from stepkeeper.restore.listing import CheckpointInfo
from stepkeeper.restore.verify import Verification
from stepkeeper.save.in_flight import InFlight

__all__ = ["CheckpointInfo", "Health", "RestoreResult", "StepOutcome", "Verification"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """The commit that was restored into the state. Every block was verified when it was read."""

    sequence: int | None
    """Its slot in the log; None if another writer saved it, without a log entry."""

    step: int
    """The last finished step at its save: continue with the next one."""

    uri: str
    """Its folder: a checkpoint that stock torch.distributed.checkpoint reads too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of `CheckpointManager.step`, and whether training should stop."""

    step: int
    """The given step."""

    in_flight: InFlight | None = None
    """The save that was started after this step; None if none was due."""

    stop: bool = False
    """True: leave the loop. All necessary saves are committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The state of checkpointing in this process. `CheckpointManager.health` returns it."""

    claim: int | None
    """Log slot of this process's claim; None before it has claimed the root."""

    committed_step: int | None
    """Step of this process's newest commit; None before the first."""

    in_flight_step: int | None
    """Step of the save that is in flight; None if there is none."""

    error: str | None
    """Error of the newest save that has ended; None if that one succeeded, or none has ended."""

    complaint: str | None
    """The upkeep that rank 0 could not finish after the last commit: its verification, or deletions. The commit is
    valid, and the upkeep is retried after the next commit. None if none is left."""

    companion_pid: int | None
    """Process id of the companion; None if no companion process is running."""

    notice: str | None
    """Source of the request to stop: sigterm, file, directive, call or peer; None if there was none."""

    @property
    def ok(self) -> bool:
        """True if the newest ended save did not fail."""
        return self.error is None
