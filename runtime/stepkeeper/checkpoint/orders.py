"""What a rank writes of a save."""

from dataclasses import dataclass

from stepkeeper.checkpoint.manifest import checkpoint_folder

__all__ = ["SaveOrder", "TensorOrder", "ValueOrder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOrder:
    """A box of a tensor to write: row-major elements from `start` on in the rank's data."""

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOrder:
    fqn: str
    start: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """What one rank writes of one save."""

    rank: int
    world_size: int
    step: int
    claim: int
    """The claim's slot."""

    nonce: str
    """The save's own: `new_nonce()`, the same on all ranks."""

    tensors: tuple[TensorOrder, ...]
    values: tuple[ValueOrder, ...]

    @property
    def folder(self) -> str:
        return checkpoint_folder(self.step, self.claim, self.nonce)
