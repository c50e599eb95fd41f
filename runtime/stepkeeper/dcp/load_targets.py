"""Fill a torch planner's memory with what its plan reads."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from stepkeeper.checkpoint.blocks import BlockTable
from stepkeeper.checkpoint.inventory import ValueRecord
from stepkeeper.checkpoint.manifest import Manifest
from stepkeeper.errors import ManifestError, RestoreError
from stepkeeper.restore.foreign.content import ForeignContent
from stepkeeper.restore.foreign.loading import COPIES
from stepkeeper.restore.foreign.read_ahead import read_ahead
from stepkeeper.restore.placing import Piece, Places
from stepkeeper.restore.ranges import Array
from stepkeeper_planners.dtypes import itemsize_bytes

__all__ = ["LoadTargets", "fill_from_chunks"]

Ints = tuple[int, ...]


@final
class LoadTargets:
    """Map the blocks that a plan reads to where their bytes go.

    Tensors go into the planner's memory, values into buffers.
    """

    def __init__(
        self,
        metadata: Metadata,
        manifests: Sequence[Manifest],
        items: Iterable[ReadItem],
        planner: LoadPlanner,
    ) -> None:
        """Map every item of the plan.

        Raises:
            ManifestError: The manifests don't say where an item is stored.

        """
        self.table = BlockTable.from_manifests(manifests)
        self.places = Places()
        self._metadata = metadata
        self._planner = planner
        self._chunks = {
            (chunk.path, chunk.offset_bytes): chunk
            for manifest in manifests
            for tensor in manifest.tensors
            for chunk in tensor.chunks
        }
        self._lock = threading.Lock()
        """Only one thread at a time calls the planner, as in torch's own readers."""

        for item in items:
            path = metadata.storage_data[item.storage_index].relative_path
            if path not in self.table.first_numbers:
                raise ManifestError(f"{item.storage_index.fqn}: no manifest lists {path!r}")
            if item.type == LoadItemType.BYTE_IO:
                self._add_value(item)
            else:
                self._add_tensor(item)
        # Of all ranks: too many to keep while the blocks are read.
        del self._chunks
        order = self.table.order_for_reading(manifests)
        self.reads: Mapping[int, Sequence[int]] = {n: () for n in order if n in self.places.by_block}

    def _add_value(self, item: ReadItem) -> None:
        info, fqn = self._metadata.storage_data[item.storage_index], item.storage_index.fqn
        if fqn not in self.places.values and info.length:
            record = ValueRecord(
                fqn=fqn, path=info.relative_path, offset_bytes=info.offset, length_bytes=info.length
            )
            self.places.add_value(record, self.table)

    def _add_tensor(self, item: ReadItem) -> None:
        target = _Target(item, stored_dtype(self._metadata, item.storage_index), self._planner)
        if not prod(item.lengths):
            target.resolve()
            target.commit()
            return
        info = self._metadata.storage_data[item.storage_index]
        chunk = self._chunks.get((info.relative_path, info.offset))
        if chunk is None:
            raise ManifestError(
                f"{item.storage_index.fqn}: no manifest lists what is at byte {info.offset} of {info.relative_path}"
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

    def resolve(self) -> torch.Tensor:
        """Return CPU memory of the item's shape and the stored dtype.

        Raises:
            RestoreError: The planner's memory has another shape.

        """
        wanted = self._planner.resolve_tensor(self._item).detach()
        if wanted.shape != self._item.lengths:
            raise RestoreError(
                f"{self._item.storage_index.fqn}: {tuple(self._item.lengths)} elements are read, and the planner has "
                f"room for {tuple(wanted.shape)}"
            )
        self._wanted = wanted
        if wanted.device.type == "cpu" and wanted.layout == torch.strided and wanted.dtype == self.dtype:
            return wanted
        self._aside = torch.empty(self._item.lengths, dtype=self.dtype)
        return self._aside

    def commit(self) -> bool:
        """Copy the elements into the planner's memory if they aren't there yet, and tell the planner."""
        assert self._wanted is not None
        if self._aside is not None:
            self._wanted.copy_(self._aside)
        self._planner.commit_tensor(self._item, self._wanted)
        self._wanted = self._aside = None
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A stored chunk of a tensor, which is read whole, and the items that need parts of it."""

    fqn: str
    number: int
    size_bytes: int
    """Host memory that it takes while it is read."""

    items: list[ReadItem]


def fill_from_chunks(content: ForeignContent, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
    """Fill tensors from the chunks of another writer's checkpoint. Each chunk is read whole, and once.

    Args:
        content: The checkpoint.
        items: The items of the plan; those that aren't tensors are skipped.
        planner: The planner that gives memory for each item.

    Raises:
        TornCheckpointError: Bytes are bad, by the checksums within a tensor's file.
        RestoreError: Something is stored in a way that isn't read here.
        StorageError: The store gave no answer, or refused.

    """

    def fill(load: _Chunk, chunk: torch.Tensor) -> None:
        for item in load.items:
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            target = _Target(item, chunk.dtype, planner)
            target.resolve().copy_(chunk[tuple(slice(start, start + length) for start, length in spans)])
            target.commit()

    chunks = list(_chunks(content, items))
    content.check_kinds(((chunk.fqn, chunk.number) for chunk in chunks), ())
    read_ahead(iter(chunks), lambda load: content.read_chunk(load.fqn, load.number), fill)


def _chunks(content: ForeignContent, items: Iterable[ReadItem]) -> Iterator[_Chunk]:
    wanted: dict[tuple[str, Ints | None], list[ReadItem]] = {}
    for item in items:
        if item.type == LoadItemType.TENSOR:
            index = item.storage_index
            place = (index.fqn, None if index.offset is None else tuple(index.offset))
            wanted.setdefault(place, []).append(item)
    numbers: dict[str, dict[Ints | None, int]] = {}
    for (fqn, offset), mine in wanted.items():
        tensor = content.tensors[fqn]
        if fqn not in numbers:
            numbers[fqn] = {box.offsets: number for number, box in enumerate(tensor.boxes)}
        number = 0 if offset is None else numbers[fqn][offset]
        n_bytes = prod(tensor.boxes[number].sizes) * itemsize_bytes(tensor.dtype)
        yield _Chunk(fqn=fqn, number=number, size_bytes=COPIES * n_bytes, items=mine)
