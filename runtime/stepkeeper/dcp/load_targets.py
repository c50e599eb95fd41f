"""Fill a torch planner's memory with the data that its plan reads."""

import threading
from collections.abc import Iterable, Mapping
from math import prod
from typing import final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from stepkeeper.checkpoint.blocks import BlockTable
from stepkeeper.checkpoint.inventory import ChunkRecord, ValueRecord
from stepkeeper.errors import ManifestError, RestoreError
from stepkeeper.restore.placing import Piece, Places
from stepkeeper.restore.ranges import Array

__all__ = ["LoadTargets"]


@final
class LoadTargets:
    """Map the blocks that a plan reads to where their bytes go.

    Tensors go into the planner's memory, values into buffers.
    """

    def __init__(
        self,
        metadata: Metadata,
        table: BlockTable,
        chunks: Mapping[tuple[str, int], ChunkRecord],
        items: Iterable[ReadItem],
        planner: LoadPlanner,
    ) -> None:
        """Map every item of the plan to memory that the planner gives, by the checkpoint's blocks.

        `chunks` has its chunks by their file and first byte in it. Raises ManifestError if no manifest lists an item.
        """
        self.table = table
        self.places = Places()
        self._metadata = metadata
        self._planner = planner
        self._chunks = chunks
        self._lock = threading.Lock()
        """Only one thread at a time calls the planner, as in torch's own readers."""

        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                self._add_value(item)
            else:
                self._add_tensor(item)
        # Of all ranks: too many to keep while the blocks are read.
        del self._chunks

    def _add_value(self, item: ReadItem) -> None:
        info, fqn = self._metadata.storage_data[item.storage_index], item.storage_index.fqn
        if info.relative_path not in self.table.first_numbers:
            raise ManifestError(f"{fqn}: no manifest lists {info.relative_path!r}")
        # Two items may read one value, and there is nothing to read of an empty one.
        if fqn not in self.places.values and info.length:
            record = ValueRecord(
                fqn=fqn, path=info.relative_path, offset_bytes=info.offset, length_bytes=info.length
            )
            self.places.add_value(record, self.table)

    def _add_tensor(self, item: ReadItem) -> None:
        target = _Target(item, stored_dtype(self._metadata, item.storage_index), self._planner)
        if not prod(item.lengths):
            # Nothing is read, but the planner has to get the item.
            target.resolve()
            target.commit()
            return
        info = self._metadata.storage_data[item.storage_index]
        chunk = self._chunks.get((info.relative_path, info.offset))
        if chunk is None:
            raise ManifestError(
                f"{item.storage_index.fqn}: no manifest lists a chunk at byte {info.offset} of {info.relative_path}"
            )
        itemsize = target.dtype.itemsize
        array = Array(
            sizes=(*chunk.sizes, itemsize),
            offsets=(*item.storage_offsets, 0),
            lengths=(*item.lengths, itemsize),
        )
        piece = Piece(
            path=chunk.path,
            start=chunk.offset_bytes + chunk.data_offset_bytes,
            array=array,
            resolve=target.resolve,
            commit=target.commit,
            n_lacking=array.n_bytes,
            lock=self._lock,
        )
        self.places.add_piece(piece, self.table)


def stored_dtype(metadata: Metadata, index: MetadataIndex) -> torch.dtype:
    """Return the dtype that a tensor is stored with."""
    entry = metadata.state_dict_metadata[index.fqn]
    assert isinstance(entry, TensorStorageMetadata)
    return entry.properties.dtype


class _Target:
    """The memory that the planner wants an item in, or memory from which the item is copied there."""

    def __init__(self, item: ReadItem, dtype: torch.dtype, planner: LoadPlanner) -> None:
        self.dtype = dtype
        self._item = item
        self._planner = planner
        self._wanted: torch.Tensor | None = None
        self._aside: torch.Tensor | None = None
        """Memory for the elements as they are stored, if the planner's can't take them byte by byte."""

    def resolve(self) -> torch.Tensor:
        """Return CPU memory of the item's shape and stored dtype. Raises RestoreError for another shape."""
        wanted = self._planner.resolve_tensor(self._item).detach()
        if wanted.shape != self._item.lengths:
            raise RestoreError(
                f"{self._item.storage_index.fqn}: {tuple(self._item.lengths)} elements are read, but the planner has "
                f"room for {tuple(wanted.shape)}"
            )
        self._wanted = wanted
        if wanted.device.type == "cpu" and wanted.layout == torch.strided and wanted.dtype == self.dtype:
            return wanted
        self._aside = torch.empty(self._item.lengths, dtype=self.dtype)
        return self._aside

    def commit(self) -> bool:
        """Copy the elements into the planner's memory if they aren't there yet, and commit them."""
        assert self._wanted is not None
        if self._aside is not None:
            self._wanted.copy_(self._aside)
        self._planner.commit_tensor(self._item, self._wanted)
        self._wanted = self._aside = None
        return True
