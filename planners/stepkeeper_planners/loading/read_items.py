"""Build the read items of a torch.distributed.checkpoint plan. They stay on their rank; other ranks get none."""

from collections.abc import Mapping
from operator import sub
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from typing_extensions import override

from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.loading.resharding import ChunkRead

__all__ = ["LocalReads", "tensor_read_item", "value_read_item"]

_NOTHING = torch.Size((0,))


class LocalReads(list[ReadItem]):
    """A rank's read items. No other rank needs them, so they pickle as an empty list and are never sent."""

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return (LocalReads, ())


def tensor_read_item(read: ChunkRead, boxes: Mapping[int, Box]) -> ReadItem:
    """Build the item for one read, named after the first local shard that it fills.

    Args:
        read: the read of a stored chunk.
        boxes: the local boxes of its tensor, by local index.
    """
    first = read.pieces[0]
    local = boxes[first.local_index]
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(read.fqn, torch.Size(local.offsets), first.local_index),
        dest_offsets=torch.Size(map(sub, first.wanted_box.offsets, local.offsets)),
        storage_index=MetadataIndex(
            read.stored_fqn, torch.Size(first.stored_box.offsets), first.stored_index
        ),
        storage_offsets=torch.Size(map(sub, read.box.offsets, first.stored_box.offsets)),
        lengths=torch.Size(read.box.sizes),
    )


def value_read_item(name: str) -> ReadItem:
    """Build the item for a stored value."""
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(name),
        dest_offsets=_NOTHING,
        storage_index=MetadataIndex(name),
        storage_offsets=_NOTHING,
        lengths=_NOTHING,
    )
