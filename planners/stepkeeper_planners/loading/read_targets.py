"""Fill tensors with the elements that are read, chunk by chunk.

A caller may have elements read into its own memory. Such pieces are diverted: the tensor keeps its old elements there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from stepkeeper_planners import adapters
from stepkeeper_planners.dtypes import cast_elements
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.loading.resharding import ChunkRead, PieceRead


@dataclass(slots=True, kw_only=True)
class ReadTarget:
    """Fill one tensor from reads that arrive in any order."""

    fqn: str
    tensor: torch.Tensor
    boxes: Mapping[int, Box]
    """This rank's parts of the tensor, by local index."""
    stored_dtype: torch.dtype
    n_reads: int
    """The number of reads that are not committed yet."""
    lookup: Callable[[int], torch.Tensor] | None = None
    """Returns the local shard to fill, if that isn't always `local_shard`."""
    sharding: str | None = None
    """The sharding that the tensor gets when it is filled, by which `boxes` were computed; None if it keeps its own."""
    _shards: dict[int, torch.Tensor] = field(default_factory=dict)
    """The result of `local_shard`, by local index."""
    _scratch: dict[Box, torch.Tensor] = field(default_factory=dict)
    """Memory for elements that are converted or divided after the read, by the box of the read."""
    _n_placed: int = 0
    """The number of pieces that were read and not diverted."""
    _diverted: dict[Box, PieceRead] = field(default_factory=dict)

    def resolve_memory(self, read: ChunkRead) -> torch.Tensor:
        """Return memory for exactly this read, in the stored dtype: part of the tensor itself if possible."""
        if self.is_direct(read):
            return self._place(read.pieces[0])
        return self.scratch_memory(read)

    def is_direct(self, read: ChunkRead) -> bool:
        """Return whether the read goes straight to its place, without scratch memory."""
        return len(read.pieces) == 1 and self.stored_dtype == self.tensor.dtype

    def scratch_memory(self, read: ChunkRead) -> torch.Tensor:
        """Return memory for exactly this read, kept until it is committed."""
        if read.box not in self._scratch:
            self._scratch[read.box] = torch.empty(read.box.sizes, dtype=self.stored_dtype)
        return self._scratch[read.box]

    def local_shard(self, local_index: int) -> torch.Tensor:
        """Return the local shard: the tensor's own memory, or a buffer that it is filled with at the end."""
        shard = self._shards.get(local_index)
        if shard is None:
            shard = adapters.host_memory(self.tensor)
            if shard is None:
                shard = torch.empty(self.boxes[local_index].sizes, dtype=self.tensor.dtype)
            self._shards[local_index] = shard
        return shard

    def set_destination(self, read: ChunkRead, tensor: torch.Tensor) -> None:
        """Note that the read goes to `tensor`. If that is a caller's own memory, the state's tensor doesn't get it."""
        shard, scratch = self._shards.get(read.pieces[0].local_index), self._scratch.get(read.box)
        own = shard if self.is_direct(read) else scratch
        if own is None or not _is_part_of(tensor, own):
            self._diverted.update((piece.wanted_box, piece) for piece in read.pieces)
            self._scratch.pop(read.box, None)

    def commit_read(self, read: ChunkRead) -> bool:
        """Copy the elements to their place. With the last read, fill the tensor, free its buffers and return True.

        Raises CastError if elements don't fit the tensor's dtype.
        """
        scratch = self._scratch.pop(read.box, None)
        if scratch is not None:
            elements = cast_elements(self.fqn, scratch, self.tensor.dtype)
            for piece in read.pieces:
                part, place = piece.wanted_box.relative_to(read.box.offsets), self._place(piece)
                place.copy_(elements[part.slices])
                shard = self._shards.get(piece.local_index)
                if shard is None or not _is_part_of(place, shard):
                    # `lookup` returned a caller's memory.
                    self._diverted[piece.wanted_box] = piece
        self._n_placed += sum(piece.wanted_box not in self._diverted for piece in read.pieces)
        self.n_reads -= 1
        if self.n_reads:
            return False
        # A tensor in host memory is its own shard, and is filled already.
        if self._n_placed and adapters.host_memory(self.tensor) is None:
            self._fill()
        self._shards.clear()
        return True

    def _fill(self) -> None:
        for index, box in self.boxes.items():
            # Boxes without elements are never read.
            self._shards.setdefault(index, torch.empty(box.sizes, dtype=self.tensor.dtype))
        before = adapters.local_shards(self.tensor) if self._diverted else []
        for piece in self._diverted.values():
            part = piece.wanted_box.relative_to(self.boxes[piece.local_index].offsets).slices
            self._shards[piece.local_index][part] = before[piece.local_index][part]
        adapters.fill(self.tensor, self._shards, self.sharding)

    def _place(self, piece: PieceRead) -> torch.Tensor:
        """Return the part of the local shard that the piece fills."""
        shard = (self.lookup or self.local_shard)(piece.local_index)
        box = self.boxes[piece.local_index]
        return shard[piece.wanted_box.relative_to(box.offsets).slices]


def _is_part_of(tensor: torch.Tensor, shard: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
