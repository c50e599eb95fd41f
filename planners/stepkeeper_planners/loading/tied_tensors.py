"""One tensor in the state, stored under several names with bytes of their own: whether these are the same."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from stepkeeper_planners import adapters
from stepkeeper_planners.errors import LoadMismatchError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.loading.landing import converted
from stepkeeper_planners.loading.resharding import PieceRead

__all__ = ["Twin", "check_twins", "twins_of"]


@dataclass(slots=True, kw_only=True)
class Twin:
    """This rank's part of a tensor as another of its names has it, to be held against what was loaded."""

    fqn: str
    """The tensor in the state."""
    loaded_fqn: str
    """The stored name that it is loaded from."""
    stored_fqn: str
    """The other one."""
    boxes: Mapping[int, Box]
    """This rank's parts of it."""
    stored_dtype: torch.dtype
    _shards: dict[int, torch.Tensor] = field(default_factory=dict)

    def resolve(self, piece: PieceRead) -> torch.Tensor:
        """Memory for the piece's elements."""
        box = self.boxes[piece.local_index]
        shard = self._shards.get(piece.local_index)
        if shard is None:
            shard = self._shards[piece.local_index] = torch.empty(box.sizes, dtype=self.stored_dtype)
        return shard[piece.wanted_box.shifted(box.offsets).slices]

    def equals(self, tensor: torch.Tensor) -> bool:
        """Whether all of it, as it was read, has the bits of the tensor's local shards."""
        loaded = adapters.local_shards(tensor)
        return all(
            _bits(converted(self.fqn, shard, tensor.dtype)).equal(_bits(loaded[index]))
            for index, shard in self._shards.items()
        )


def twins_of(
    pieces: Iterable[PieceRead],
    loaded: Iterable[PieceRead],
    boxes: Mapping[str, Mapping[int, Box]],
    stored_dtype_of: Callable[[str], torch.dtype],
) -> dict[str, Twin]:
    """One for each stored name of which `pieces` are to be read; `loaded` are those that the tensors get."""
    loaded_from = {piece.fqn: piece.stored_fqn for piece in loaded}
    return {
        piece.stored_fqn: Twin(
            fqn=piece.fqn,
            loaded_fqn=loaded_from[piece.fqn],
            stored_fqn=piece.stored_fqn,
            boxes=boxes[piece.fqn],
            stored_dtype=stored_dtype_of(piece.stored_fqn),
        )
        for piece in pieces
    }


def check_twins(twins: Iterable[Twin], tensors: Mapping[str, torch.Tensor], *, strict: bool) -> None:
    """All tensors were loaded, and what other names have of them is the same; or else a warning said it is not.

    Raises:
        LoadMismatchError: `strict`, and it is not.
    """
    differing = [twin for twin in twins if not twin.equals(tensors[twin.fqn])]
    reasons = {
        twin.stored_fqn: f"{twin.loaded_fqn} and {twin.stored_fqn} are one tensor in the state, and have different "
        "elements in the checkpoint"
        for twin in differing
    }
    if reasons and strict:
        loaded = ", ".join(dict.fromkeys(twin.loaded_fqn for twin in differing))
        advice = (
            f"Untie them in the state, or choose: exclude={tuple(reasons)!r} loads the elements of {loaded}."
        )
        raise LoadMismatchError(
            mismatched=reasons,
            advice=(advice,),
            loaded="its tensors were loaded, its values were not",
        )
    for twin in differing:
        warnings.warn(f"{reasons[twin.stored_fqn]}: those of {twin.loaded_fqn} were loaded", stacklevel=2)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8) if plain.numel() else plain
