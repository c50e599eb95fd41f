"""Check that the names of a tied tensor have the same elements, where each is stored with bytes of its own."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from stepkeeper_planners import adapters
from stepkeeper_planners.dtypes import cast_elements
from stepkeeper_planners.errors import LoadMismatchError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.loading.resharding import PieceRead

__all__ = ["TiedCopy", "build_tied_copies", "check_tied_copies"]


@dataclass(slots=True, kw_only=True)
class TiedCopy:
    """This rank's part of a tensor as one of its other names stores it, to compare with the loaded elements."""

    fqn: str
    """The tensor in the state."""
    loaded_fqn: str
    """The stored name that the tensor is loaded from."""
    stored_fqn: str
    """The other stored name, which is compared."""
    boxes: Mapping[int, Box]
    """This rank's parts of the tensor, by local index."""
    stored_dtype: torch.dtype
    _shards: dict[int, torch.Tensor] = field(default_factory=dict)

    def resolve_memory(self, piece: PieceRead) -> torch.Tensor:
        """Return memory for the piece's elements."""
        box = self.boxes[piece.local_index]
        shard = self._shards.get(piece.local_index)
        if shard is None:
            shard = self._shards[piece.local_index] = torch.empty(box.sizes, dtype=self.stored_dtype)
        return shard[piece.wanted_box.relative_to(box.offsets).slices]

    def equals(self, tensor: torch.Tensor) -> bool:
        """Return whether all that was read equals the tensor's local shards, bit for bit."""
        loaded = adapters.local_shards(tensor)
        return all(
            _bits(cast_elements(self.fqn, shard, tensor.dtype)).equal(_bits(loaded[index]))
            for index, shard in self._shards.items()
        )


def build_tied_copies(
    pieces: Iterable[PieceRead],
    loaded: Iterable[PieceRead],
    boxes: Mapping[str, Mapping[int, Box]],
    stored_dtype_of: Callable[[str], torch.dtype],
) -> dict[str, TiedCopy]:
    """Return a copy to compare for each stored name in `pieces`, the reads of other names than the `loaded` ones.

    `boxes` has the local boxes of each tensor, by local index.
    """
    loaded_from = {piece.fqn: piece.stored_fqn for piece in loaded}
    return {
        piece.stored_fqn: TiedCopy(
            fqn=piece.fqn,
            loaded_fqn=loaded_from[piece.fqn],
            stored_fqn=piece.stored_fqn,
            boxes=boxes[piece.fqn],
            stored_dtype=stored_dtype_of(piece.stored_fqn),
        )
        for piece in pieces
    }


def check_tied_copies(
    copies: Iterable[TiedCopy], tensors: Mapping[str, torch.Tensor], *, strict: bool
) -> None:
    """Compare the copies with the loaded tensors. If they differ, raise LoadMismatchError, or warn if not `strict`."""
    differing = [copy for copy in copies if not copy.equals(tensors[copy.fqn])]
    reasons = {
        copy.stored_fqn: f"{copy.loaded_fqn} and {copy.stored_fqn} are one tensor in the state, and have different "
        "elements in the checkpoint"
        for copy in differing
    }
    if reasons and strict:
        loaded = ", ".join(dict.fromkeys(copy.loaded_fqn for copy in differing))
        advice = (
            f"Untie them in the state, or choose: exclude={tuple(reasons)!r} loads the elements of {loaded}."
        )
        raise LoadMismatchError(
            mismatched=reasons,
            advice=(advice,),
            loaded="its tensors were loaded, its values were not",
        )
    for copy in differing:
        warnings.warn(f"{reasons[copy.stored_fqn]}: those of {copy.loaded_fqn} were loaded", stacklevel=2)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bytes, so that nan equals nan, and 0.0 doesn't equal -0.0."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8) if plain.numel() else plain
