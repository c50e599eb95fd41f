"""Handle local tensors that declare which boxes of a global tensor they hold.

torch's CheckpointableTensor protocol is recognized by four attributes, which any torch.Tensor may be given,
also before torch 2.15.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch

from stepkeeper_planners.adapters import plain
from stepkeeper_planners.dtypes import dtype_name
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, Ranks, TensorLayout

_ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""The shape of the global tensor; then for each local shard: its offsets in the global tensor, its offsets in the local
tensor, which may hold padding too, and its sizes."""


def is_checkpointable(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has the protocol's attributes."""
    return all(hasattr(tensor, name) for name in _ATTRIBUTES)


def describe(fqn: str, tensor: torch.Tensor, ranks: Ranks) -> TensorLayout:
    """Describe the chunks of this rank, without those of others: the layout isn't complete.

    Raises UnsupportedShardingError if the tensor has no elements in memory, or isn't strided.
    """
    plain.check_storable(fqn, tensor)
    shape = _global_shape(tensor)
    chunks: dict[Box, list[Owner]] = {}
    if not prod(shape):
        # Every layout has a chunk, also that of a tensor without elements.
        chunks[Box.whole(shape)] = [Owner(rank=ranks.rank, local_index=0)]
    for index, (box, _) in enumerate(_shards(tensor)):
        if box.volume:
            chunks.setdefault(box, []).append(Owner(rank=ranks.rank, local_index=index))
    return TensorLayout(
        fqn=fqn,
        dtype=dtype_name(tensor.dtype),
        global_shape=shape,
        chunks=tuple(Chunk(box=box, owners=tuple(owners)) for box, owners in chunks.items()),
        complete=False,
    )


def local_shards(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the shards of the local tensor on the CPU, contiguous, without padding."""
    shape = _global_shape(tensor)
    if not prod(shape):
        return [torch.empty(shape, dtype=tensor.dtype)]
    return [plain.to_plain_cpu(tensor.detach()[local.slices]) for _, local in _shards(tensor)]


def fill(tensor: torch.Tensor, pieces: Mapping[int, torch.Tensor]) -> None:
    """Fill every local shard from its piece; the elements between the shards stay unchanged.

    A shard with the same box as an earlier one gets the same piece. Raises ValueError as `get_piece`.
    """
    first: dict[Box, int] = {}
    for index, (box, local) in enumerate(_shards(tensor)):
        if box.volume:
            piece = plain.get_piece(pieces, first.setdefault(box, index), box.sizes, tensor.dtype)
            with torch.no_grad():
                tensor.detach()[local.slices].copy_(piece)


def structure(tensor: torch.Tensor) -> object:
    """Return which boxes of the global tensor it holds, and where."""
    return tuple(str(getattr(tensor, name)) for name in _ATTRIBUTES)


def identity(tensor: torch.Tensor) -> object:
    """Return which memory it uses, how it views it, and which part of the global tensor that is."""
    held: Any = tensor
    boxes = (tuple(held.global_shape), tuple(map(tuple, held.global_offsets)))
    place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    # The storage is compared, not its address: the local tensor may be empty on some ranks only, and tied on all.
    return ("checkpointable", tensor.untyped_storage()._cdata, place, boxes)  # noqa: SLF001 — as torch.serialization


def _global_shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.global_shape)


def _shards(tensor: torch.Tensor) -> Iterator[tuple[Box, Box]]:
    """Yield each shard's box in the global tensor and in the local one."""
    held: Any = tensor
    for offsets, local_offsets, sizes in zip(
        held.global_offsets, held.local_offsets, held.local_sizes, strict=True
    ):
        yield (
            Box(offsets=tuple(offsets), sizes=tuple(sizes)),
            Box(offsets=tuple(local_offsets), sizes=tuple(sizes)),
        )
