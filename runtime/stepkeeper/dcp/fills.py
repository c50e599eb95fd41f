"""What a plan of torch's reads, on its way into the planner's memory."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import prod
from typing import Final, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from stepkeeper.errors import ManifestError, RestoreError
from stepkeeper.legacy.content import LegacyContent
from stepkeeper.manifest import Manifest, ValueRecord
from stepkeeper.restore.blocks import BlockTable
from stepkeeper.restore.placing import Piece, Places
from stepkeeper.restore.ranges import Array

__all__ = ["Fills", "fill_from_chunks"]

_READ_AHEAD: Final = 8
"""Chunks that are read while one is put in place: bounds host memory."""


@final
class Fills:
    """Which blocks are read, and where their bytes go: tensors into place, values aside."""

    def __init__(
        self,
        metadata: Metadata,
        manifests: Sequence[Manifest],
        items: Iterable[ReadItem],
        planner: LoadPlanner,
    ) -> None:
        """Raises ManifestError if the manifests don't say where something is."""
        self.table = BlockTable.of_data(manifests)
        self.places = Places()
        chunks = {
            (chunk.path, chunk.offset_bytes): chunk
            for manifest in manifests
            for tensor in manifest.tensors
            for chunk in tensor.chunks
        }
        lock = threading.Lock()
        for item in items:
            info = metadata.storage_data[item.storage_index]
            if info.relative_path not in self.table.first_numbers:
                raise ManifestError(f"{item.storage_index.fqn}: no manifest lists {info.relative_path!r}")
            if item.type == LoadItemType.BYTE_IO:
                if item.storage_index.fqn not in self.places.values and info.length:
                    record = ValueRecord(
                        fqn=item.storage_index.fqn,
                        path=info.relative_path,
                        offset_bytes=info.offset,
                        length_bytes=info.length,
                    )
                    self.places.add_value(record, self.table)
                continue
            target = _Target(item, stored_dtype(metadata, item.storage_index), planner)
            if not prod(item.lengths):
                target.resolve()
                target.commit()
                continue
            chunk = chunks.get((info.relative_path, info.offset))
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
                # Planners are asked by one thread at a time, as by torch's own readers.
                lock=lock,
            )
            self.places.add_piece(piece, self.table)
        order = self.table.reading_order(manifests)
        self.reads: Mapping[int, Sequence[int]] = {n: () for n in order if n in self.places.by_block}


def stored_dtype(metadata: Metadata, index: MetadataIndex) -> torch.dtype:
    entry = metadata.state_dict_metadata[index.fqn]
    assert isinstance(entry, TensorStorageMetadata)
    return entry.properties.dtype


class _Target:
    """Where the planner wants an item: there itself, or in memory from which it is copied there."""

    def __init__(self, item: ReadItem, dtype: torch.dtype, planner: LoadPlanner) -> None:
        self.dtype = dtype
        self._item = item
        self._planner = planner
        self._wanted: torch.Tensor | None = None
        self._aside: torch.Tensor | None = None

    def resolve(self) -> torch.Tensor:
        """CPU memory of the item's shape, of the stored dtype. Raises RestoreError if the planner's has another."""
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
        """The planner has its elements."""
        assert self._wanted is not None
        if self._aside is not None:
            self._wanted.copy_(self._aside)
        self._planner.commit_tensor(self._item, self._wanted)
        self._wanted = self._aside = None
        return True


def fill_from_chunks(content: LegacyContent, items: Iterable[ReadItem], planner: LoadPlanner) -> None:
    """Tensors get their parts of the stored chunks, each of which is read whole, and once.

    Raises:
        TornCheckpointError: bytes are bad, by the checksums within a blob.
        RestoreError: something is stored in a way that isn't read here.
        StorageError: the store gave no answer, or refused.

    """
    numbers: dict[str, dict[tuple[int, ...], int]] = {}
    wanted: dict[tuple[str, int], list[ReadItem]] = {}
    for item in items:
        if item.type != LoadItemType.TENSOR:
            continue
        fqn, offset = item.storage_index.fqn, item.storage_index.offset
        if fqn not in numbers:
            numbers[fqn] = {box.offsets: number for number, box in enumerate(content.tensors[fqn].boxes)}
        number = numbers[fqn][tuple(offset)] if offset is not None else 0
        wanted.setdefault((fqn, number), []).append(item)
    for chunk, mine in _read_ahead(content, wanted):
        for item in mine:
            spans = zip(item.storage_offsets, item.lengths, strict=True)
            part = chunk[tuple(slice(start, start + length) for start, length in spans)]
            target = _Target(item, chunk.dtype, planner)
            target.resolve().copy_(part)
            target.commit()


def _read_ahead(
    content: LegacyContent, wanted: Mapping[tuple[str, int], list[ReadItem]]
) -> Iterator[tuple[torch.Tensor, list[ReadItem]]]:
    """Each chunk, read by several threads, a bounded number ahead of who takes them."""
    waiting: deque[tuple[Future[torch.Tensor], list[ReadItem]]] = deque()
    with ThreadPoolExecutor(_READ_AHEAD, thread_name_prefix="stepkeeper-read") as threads:
        try:
            for (fqn, number), items in wanted.items():
                waiting.append((threads.submit(partial(content.chunk, fqn, number)), items))
                if len(waiting) > _READ_AHEAD:
                    first, mine = waiting.popleft()
                    yield first.result(), mine
            while waiting:
                first, mine = waiting.popleft()
                yield first.result(), mine
        finally:
            threads.shutdown(cancel_futures=True)
