"""Hold what a restore or a question about a checkpoint returns to the caller."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CheckpointInfo", "RestoreResult", "TensorInfo", "Verification"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """The commit that is in the state now. Every block of it that was read was verified."""

    sequence: int
    """Its slot in the log."""

    step: int
    """The last step that was finished when it was saved: go on with the next one."""

    uri: str
    """Its folder: a checkpoint that stock torch.distributed.checkpoint reads too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    dtype: str
    """torch's name for it without the prefix: float32."""

    shape: tuple[int, ...]
    """The shape of the whole tensor, however it was sharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """The contents of a checkpoint."""

    sequence: int | None
    """Its slot in the log. None: another writer saved it, and the log has no entry of it."""

    step: int
    uri: str
    size_bytes: int
    tensors: Mapping[str, TensorInfo]
    values: tuple[str, ...]
    """Names of the values that are no tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A commit whose every byte is as it was written."""

    sequence: int
    """Its slot in the log."""

    step: int
    uri: str
    n_objects: int
    size_bytes: int
    """The size of all its objects; all of these bytes were read."""
