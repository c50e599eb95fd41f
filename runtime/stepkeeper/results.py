"""Define the values that a manager's methods return."""

from dataclasses import dataclass

from stepkeeper.restore.listing import CheckpointInfo
from stepkeeper.restore.verify import Verification
from stepkeeper.save.in_flight import InFlight

__all__ = ["CheckpointInfo", "Health", "RestoreResult", "StepOutcome", "Verification"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """The commit that is in the state now. Every block of it that was read was verified."""

    sequence: int | None
    """Its slot in the log. None: another writer saved it, and the log has no entry of it."""

    step: int
    """The last step that was finished when it was saved: go on with the next one."""

    uri: str
    """Its folder: a checkpoint that stock torch.distributed.checkpoint reads too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """Tell what `CheckpointManager.step` did, and whether training should go on."""

    step: int
    """The step that was passed in."""

    in_flight: InFlight | None = None
    """The save that was started after this step; None if none was due."""

    stop: bool = False
    """True: leave the loop. Everything that was to be saved is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Describe how checkpointing is doing in this process. `CheckpointManager.health` returns it."""

    claim: int | None
    """Log slot of this process's claim; None before it has claimed the root."""

    committed_step: int | None
    """Step of this process's newest commit; None before the first."""

    in_flight_step: int | None
    """Step of the save that is in flight; None if there is none."""

    error: str | None
    """Error of the newest save that has ended; None if that one succeeded, or none has ended."""

    complaint: str | None
    """The work that rank 0 could not finish after the last commit: to verify it, or to delete data. The commit stands,
    and all of that work is retried after the next commit. None if nothing is left over."""

    companion_pid: int | None
    """Process id of the companion; None if no companion process runs now."""

    notice: str | None
    """Source of the request to stop: sigterm, file, directive, call or peer; None if there was none."""

    @property
    def ok(self) -> bool:
        """True if the newest save that has ended did not fail."""
        return self.error is None
