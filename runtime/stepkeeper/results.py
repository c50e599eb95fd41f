"""What the manager answers with."""

from collections.abc import Mapping
from dataclasses import dataclass

from stepkeeper.save.pipeline import InFlight

__all__ = ["CheckpointInfo", "Health", "RestoreResult", "StepOutcome", "TensorInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """A commit that is in the state now, every block of it verified."""

    sequence: int
    """Its slot in the log."""

    step: int
    """The last step that was finished when it was saved: go on with the one after."""

    uri: str
    """Its folder: a checkpoint that stock torch.distributed.checkpoint reads too."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    dtype: str
    """Without torch's prefix: float32."""

    shape: tuple[int, ...]
    """The whole tensor's, however it was sharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What a commit holds."""

    sequence: int | None
    """None: it is another writer's, which the log has no entry of."""

    step: int
    uri: str
    size_bytes: int
    tensors: Mapping[str, TensorInfo]
    values: tuple[str, ...]
    """Names of what is no tensor."""
