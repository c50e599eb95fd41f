"""This rank's tensors on their way to a storage writer: moved once, in the order written, and let go after that."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from stepkeeper_planners import adapters
from stepkeeper_planners.saving.assignment import TensorWrite

__all__ = ["WriteData"]


class WriteData:
    """What one save takes of which tensor. Writers may ask from several threads."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], copied: Mapping[str, torch.Tensor]) -> None:
        self.tensors = {**tensors, **copied}
        """By name; what isn't needed any more is taken out if it is a copy that was made for this save."""
        self.shards: dict[str, list[torch.Tensor]] = {}
        """Those that were moved and are still needed."""
        self._copied = set(copied)
        self._writes: dict[MetadataIndex, TensorWrite] = {}
        self._n_unwritten: Counter[str] = Counter()
        self._lock = threading.Lock()

    def set_writes(self, writes: Mapping[MetadataIndex, TensorWrite]) -> None:
        """This is what will be asked for."""
        self._writes = dict(writes)
        self._n_unwritten = Counter(write.fqn for write in writes.values())
        self.shards = {}

    def drop_copies_without_writes(self) -> None:
        """Copies of which another rank writes everything take no memory of the devices any more."""
        self._drop_copies(self._copied - self._n_unwritten.keys())

    def __contains__(self, index: MetadataIndex) -> bool:
        return index in self._writes

    def load_piece(self, index: MetadataIndex) -> torch.Tensor:
        """The elements, on the CPU. The tensor's shards are moved from the devices together."""
        write = self._writes[index]
        with self._lock:
            if write.fqn not in self.shards:
                self.shards[write.fqn] = adapters.local_shards(self.tensors[write.fqn])
            shard = self.shards[write.fqn][write.local_index]
        # A part must not bring the memory of the whole with it into what is written.
        return shard if write.box.sizes == tuple(shard.shape) else shard[write.shard_box.slices].clone()

    def release_piece(self, index: MetadataIndex) -> None:
        """The piece was taken; after a tensor's last one nothing of it is held here."""
        fqn = self._writes[index].fqn
        with self._lock:
            self._n_unwritten[fqn] -= 1
            if self._n_unwritten[fqn] <= 0:
                self.shards.pop(fqn, None)
                self._drop_copies([fqn])

    def _drop_copies(self, names: Iterable[str]) -> None:
        for fqn in self._copied.intersection(names):
            self._copied.remove(fqn)
            del self.tensors[fqn]
