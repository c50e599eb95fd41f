"""Make the write items of plans for torch.distributed.checkpoint. Items of other ranks are never sent."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import SupportsIndex, overload

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from typing_extensions import override

from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.saving.assignment import TensorWrite

__all__ = ["LazyItems", "OwnItems", "make_tensor_item", "make_value_item"]


class OwnItems(list[WriteItem]):
    """This rank's items. Pickled, the list is empty: every other rank can make the items itself."""

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type["OwnItems"], tuple[()]]:
        return (OwnItems, ())


class LazyItems(Sequence[WriteItem]):
    """Another rank's items, made when a storage writer looks at them. Pickled, they are an empty `OwnItems`."""

    def __init__(self, make: Callable[[], Sequence[WriteItem]]) -> None:
        self._make = make

    @cached_property
    def _items(self) -> Sequence[WriteItem]:
        return self._make()

    @overload
    def __getitem__(self, index: int) -> WriteItem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WriteItem]: ...
    @override
    def __getitem__(self, index: int | slice) -> WriteItem | Sequence[WriteItem]:
        return self._items[index]

    @override
    def __len__(self) -> int:
        return len(self._items)

    @override
    def __iter__(self) -> Iterator[WriteItem]:
        return iter(self._items)

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[OwnItems], tuple[()]]:
        return (OwnItems, ())


def make_tensor_item(write: TensorWrite, *, is_sharded: bool) -> WriteItem:
    """Make the write item for one box of a tensor.

    Args:
        write: the box.
        is_sharded: whether devices hold different parts of the tensor. The item's index then tells the position of the
            local shard that holds the box, as torch_xla's does.
    """
    offsets, sizes = torch.Size(write.box.offsets), torch.Size(write.box.sizes)
    return WriteItem(
        index=MetadataIndex(write.fqn, offsets, write.local_index if is_sharded else None),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=dtype_of(write.dtype)),
            size=torch.Size(write.global_shape),
        ),
    )


def make_value_item(name: str) -> WriteItem:
    """Make the write item for a value."""
    return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
