"""Where the elements of one tensor land as they are read, and how they get into it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from stepkeeper_planners import adapters
from stepkeeper_planners.boxes import Box
from stepkeeper_planners.errors import CastError
from stepkeeper_planners.reshard import ChunkRead, PieceRead


@dataclass(slots=True, kw_only=True)
class Landing:
    """One tensor that is being read, chunk by chunk, in any order."""

    fqn: str
    tensor: torch.Tensor
    boxes: Mapping[int, Box]
    """This rank's parts of it."""
    stored_dtype: torch.dtype
    n_reads: int
    """Those that are still to come."""
    _shards: dict[int, torch.Tensor] = field(default_factory=dict)
    _scratch: dict[Box, torch.Tensor] = field(default_factory=dict)

    def resolve(self, read: ChunkRead) -> torch.Tensor:
        """Memory for exactly what is read, in the stored dtype: where it belongs already, if that can be."""
        if len(read.pieces) == 1 and self.stored_dtype == self.tensor.dtype:
            return self._place(read.pieces[0])
        if read.box not in self._scratch:
            self._scratch[read.box] = torch.empty(read.box.sizes, dtype=self.stored_dtype)
        return self._scratch[read.box]

    def commit(self, read: ChunkRead) -> bool:
        """What was read is where it belongs; True if the tensor has got all, buffers are let go then.

        Raises:
            CastError: elements don't fit the tensor's dtype.
        """
        scratch = self._scratch.pop(read.box, None)
        if scratch is not None:
            elements = _converted(self.fqn, scratch, self.tensor.dtype)
            for piece in read.pieces:
                part = piece.wanted_box.shifted(read.box.offsets)
                self._place(piece).copy_(elements[part.slices])
        self.n_reads -= 1
        if self.n_reads:
            return False
        if adapters.in_place(self.tensor) is None:
            for index, box in self.boxes.items():
                self._shards.setdefault(index, torch.empty(box.sizes, dtype=self.tensor.dtype))
            adapters.fill(self.tensor, self._shards)
        self._shards.clear()
        return True

    def _place(self, piece: PieceRead) -> torch.Tensor:
        """The part of the local shard that the piece fills."""
        box = self.boxes[piece.local_index]
        shard = self._shards.get(piece.local_index)
        if shard is None:
            own = adapters.in_place(self.tensor)
            shard = torch.empty(box.sizes, dtype=self.tensor.dtype) if own is None else own
            self._shards[piece.local_index] = shard
        return shard[piece.wanted_box.shifted(box.offsets).slices]


def _converted(fqn: str, elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same numbers in another dtype; of floats and complex numbers the nearest.

    Raises:
        CastError: a number is beyond what the dtype can say.
    """
    if elements.dtype == dtype:
        return elements
    converted = elements.to(dtype)
    if elements.dtype.is_floating_point or elements.dtype.is_complex:
        fits = bool((_finite(converted) | ~_finite(elements)).all())
    else:
        fits = (
            dtype.is_floating_point
            or dtype.is_complex
            or bool((converted.to(elements.dtype) == elements).all())
        )
    if not fits:
        raise CastError(
            f"{fqn}: an element stored as {elements.dtype} is beyond {dtype}. Load it as it was stored, or exclude it"
        )
    return converted


def _finite(elements: torch.Tensor) -> torch.Tensor:
    """Which of them are; torch itself can't say it of most dtypes of eight bits."""
    return (elements.float() if elements.dtype.itemsize == 1 else elements).isfinite()
