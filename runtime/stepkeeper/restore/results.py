"""Answer who restores or asks: which commit the state holds now, and what a commit holds."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CheckpointInfo", "RestoreResult", "TensorInfo", "Verification"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """A commit of which every byte is as it was written."""

    sequence: int
    """Its slot in the log."""

    step: int
    uri: str
    n_objects: int
    size_bytes: int
    """All of which was read."""
