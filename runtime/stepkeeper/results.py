"""Answer a training script: what a step did, and how checkpointing is doing."""

from dataclasses import dataclass

from stepkeeper.save.pipeline import InFlight

__all__ = ["Health", "StepOutcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What `CheckpointManager.step` did, and whether to go on."""

    step: int
    in_flight: InFlight | None = None
    """The save that was begun after this step; None if none was due."""

    stop: bool = False
    """True: leave the loop. What is to be saved is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How checkpointing is doing in this process."""

    claim: int | None
    """Slot of this process's begin; None before it has one."""

    committed_step: int | None
    """Of the newest commit of this process."""

    in_flight_step: int | None
    error: str | None
    """Of the newest save that has ended, if it failed."""

    complaint: str | None
    """What went wrong after a commit, in rank 0: it isn't verified, or what was to be deleted is still there. The
    commit stands, and all of it is tried again after the next one; None once that went well."""

    companion_pid: int | None
    """None: no companion process runs now."""

    notice: str | None
    """What asked this process to stop, if anything did."""

    @property
    def ok(self) -> bool:
        """True if the newest save that has ended did not fail."""
        return self.error is None
