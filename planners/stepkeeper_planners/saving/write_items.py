"""Make the input of torch's storage writers: items, and the tensors on the CPU, once each."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, SupportsIndex

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from typing_extensions import override

from stepkeeper_planners import adapters
from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.saving.assignment import TensorWrite

__all__ = ["OwnItems", "WriteData", "make_tensor_item", "make_value_item"]

_LOCK: Final = threading.Lock()
"""One for all saves: a planner with a lock couldn't be pickled, and torch sends one to its checkpointer process."""


class OwnItems(list[WriteItem]):
    """This rank's items. Pickled, the list is empty: every other rank can make the items itself."""

    @override
    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type["OwnItems"], tuple[()]]:
        return (OwnItems, ())


def make_tensor_item(write: TensorWrite, *, is_sharded: bool) -> WriteItem:
    """Make the write item for one box of a tensor.

    If devices hold different parts of it (`is_sharded`), its index has the number of the local shard, as in torch_xla.
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


class WriteData:
    """Hold the tensors of one save until their pieces are written. Storage writers may call it from several threads."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], copied: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {**tensors, **copied}
        """The tensors by name. A copy that was made for this save is removed once it isn't needed."""
        self.shards: dict[str, list[torch.Tensor]] = {}
        """The local shards on the CPU of tensors that still have pieces to write."""
        self._copied = set(copied)
        self._writes: dict[MetadataIndex, TensorWrite] = {}
        self._n_unwritten: Counter[str] = Counter()

    def set_writes(self, writes: Mapping[MetadataIndex, TensorWrite]) -> None:
        """Set the writes for which pieces will be loaded."""
        self._writes = dict(writes)
        self._n_unwritten = Counter(write.fqn for write in writes.values())
        self.shards = {}

    def drop_copies_without_writes(self) -> None:
        """Release the device memory of copies of which this rank writes nothing."""
        self._drop_copies(self._copied - self._n_unwritten.keys())

    def __contains__(self, index: MetadataIndex) -> bool:
        return index in self._writes

    def load_piece(self, index: MetadataIndex) -> torch.Tensor:
        """Return the elements of a write, on the CPU. Move all local shards of the tensor from the devices together."""
        write = self._writes[index]
        with _LOCK:
            if write.fqn not in self.shards:
                self.shards[write.fqn] = adapters.local_shards(self.tensors[write.fqn])
            shard = self.shards[write.fqn][write.local_index]
        # torch.save writes all memory of a tensor, so a part gets memory of its own.
        return shard if write.box.sizes == tuple(shard.shape) else shard[write.shard_box.slices].clone()

    def release_piece(self, index: MetadataIndex) -> None:
        """Mark a piece as taken. After a tensor's last piece, release its shards and its copy."""
        fqn = self._writes[index].fqn
        with _LOCK:
            self._n_unwritten[fqn] -= 1
            if self._n_unwritten[fqn] <= 0:
                self.shards.pop(fqn, None)
                self._drop_copies([fqn])

    def _drop_copies(self, names: Iterable[str]) -> None:
        for fqn in self._copied.intersection(names):
            self._copied.remove(fqn)
            del self.tensors[fqn]
