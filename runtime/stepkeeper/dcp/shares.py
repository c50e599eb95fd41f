"""What a rank writes of a plan of torch's, as this package's objects; and what `.metadata` says of all of it."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from math import prod
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from stepkeeper.checkpoint import TensorOrder, ValueOrder
from stepkeeper.checkpoint.dcp_format.dtypes import size_in_bytes
from stepkeeper.checkpoint.manifest import ChunkRecord, Inventory, Manifest, ObjectRecord, ValueRecord
from stepkeeper.checkpoint.packing import File
from stepkeeper.errors import SaveError
from stepkeeper_planners.dtypes import dtype_name

__all__ = ["Share", "WrittenItem", "add_storage_places", "join_manifests"]

Resolve = Callable[[WriteItem], Any]
"""A planner's `resolve_data`."""

_ALIGNMENT_BYTES: Final = 64
"""Items are given places apart, also those without bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenItem:
    """What a rank tells the coordinator of one item."""

    pieces: tuple[ChunkRecord | ValueRecord, ...]
    """In order; several of a tensor that was cut."""

    manifest: Manifest | None = None
    """Of all that the rank wrote; with its first item."""


@dataclass(slots=True, kw_only=True)
class _Item:
    item: WriteItem
    order: TensorOrder | ValueOrder
    end: int
    n_open: int
    data: memoryview | None = None


@final
class Share:
    """A rank's items as one range of bytes. Tensors are asked for when they are written, and let go after that."""

    def __init__(self, items: Sequence[WriteItem], resolve: Resolve) -> None:
        """Raises ValueError if a tensor is of a dtype that can't be saved."""
        self._resolve = resolve
        self._items: list[_Item] = []
        self._lock = threading.Lock()
        start = 0
        for item in items:
            made = self._make_item(item, start)
            self._items.append(made)
            start += -(-max(made.end - start, 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._starts = [made.order.start for made in self._items]

    @property
    def tensors(self) -> tuple[TensorOrder, ...]:
        return tuple(made.order for made in self._items if isinstance(made.order, TensorOrder))

    @property
    def values(self) -> tuple[ValueOrder, ...]:
        return tuple(made.order for made in self._items if isinstance(made.order, ValueOrder))

    def __getitem__(self, span: slice, /) -> memoryview:
        """Raises SaveError if the planner gives other elements than it had planned."""
        made = self._item_at(span.start)
        with self._lock:
            # Planners are asked by one thread at a time: torch's own writers don't need more of them by default.
            if made.data is None:
                made.data = _elements(made.order, self._resolve(made.item))
            part = made.data[span.start - made.order.start : span.stop - made.order.start]
            made.n_open -= span.stop - span.start
            if made.n_open <= 0:
                made.data = None
        return part

    def locate_items(self, files: Iterable[File], manifest: Manifest) -> list[tuple[WriteItem, WrittenItem]]:
        """Each item with where it is, if the share became these files, and they what the manifest says."""
        chunks = {
            (chunk.path, chunk.offset_bytes): chunk for tensor in manifest.tensors for chunk in tensor.chunks
        }
        values = {value.fqn: value for value in manifest.values}
        pieces: dict[int, list[ChunkRecord | ValueRecord]] = {}
        for file in files:
            for placed in file.items:
                is_value = isinstance(placed.order, ValueOrder)
                record = values[placed.order.fqn] if is_value else chunks[file.name, placed.offset_bytes]
                pieces.setdefault(self._item_at(placed.order.start).order.start, []).append(record)
        return [
            (
                made.item,
                WrittenItem(pieces=tuple(pieces[made.order.start]), manifest=None if number else manifest),
            )
            for number, made in enumerate(self._items)
        ]

    def _item_at(self, place: int) -> _Item:
        return self._items[bisect_right(self._starts, place) - 1]

    def _make_item(self, item: WriteItem, start: int) -> _Item:
        fqn = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            blob = self._resolve(item)
            assert isinstance(blob, BytesIO)
            data = blob.getbuffer()
            order = ValueOrder(fqn=fqn, start=start, length_bytes=data.nbytes)
            return _Item(item=item, order=order, end=start + data.nbytes, n_open=data.nbytes, data=data)
        planned = item.tensor_data
        assert planned is not None
        tensor = TensorOrder(
            fqn=fqn,
            dtype=dtype_name(planned.properties.dtype),
            global_shape=tuple(planned.size),
            offsets=tuple(planned.chunk.offsets),
            sizes=tuple(planned.chunk.sizes),
            start=start,
        )
        n_bytes = size_in_bytes(tensor.dtype, tensor.sizes)
        return _Item(item=item, order=tensor, end=start + n_bytes, n_open=n_bytes)


def _elements(order: TensorOrder | ValueOrder, resolved: Any) -> memoryview:
    """The bytes of a tensor's elements, row-major, of which nothing is copied where they lie so."""
    assert isinstance(order, TensorOrder)
    assert isinstance(resolved, torch.Tensor)
    tensor = resolved.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tuple(tensor.shape) != order.sizes or dtype_name(tensor.dtype) != order.dtype:
        raise SaveError(
            f"{order.fqn}: the planner said {order.dtype}{list(order.sizes)} and gave "
            f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
        )
    if not prod(order.sizes):
        return memoryview(b"")
    flat: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.data


def join_manifests(
    written: Iterable[WrittenItem], *, nonce: str, more: Sequence[ObjectRecord] = ()
) -> Manifest:
    """One of all that the ranks wrote, and of `more`: it stands alone."""
    manifests = [each.manifest for each in written if each.manifest is not None]
    return Manifest(
        rank=0,
        world_size=1,
        step=0,
        claim=0,
        nonce=nonce,
        objects=(*(each for manifest in manifests for each in manifest.objects), *more),
        inventory=Inventory(
            tensors=tuple(each for manifest in manifests for each in manifest.tensors),
            values=tuple(each for manifest in manifests for each in manifest.values),
        ),
    )


def add_storage_places(metadata: Metadata, written: Mapping[MetadataIndex, WrittenItem]) -> Metadata:
    """The metadata with where everything is, as torch's FileSystemReader understands it.

    What was cut are chunks of their own. `metadata` isn't changed: planners keep theirs for the next save.
    """
    placed = replace(metadata)
    # A planner's own metadata checks here that nothing is lacking, and adds the further names of tied tensors.
    placed.storage_data = dict(written)
    places: dict[MetadataIndex, _StorageInfo] = {}
    cut: dict[str, dict[tuple[int, ...], tuple[ChunkRecord, ...]]] = {}
    for index, item in placed.storage_data.items():
        first = item.pieces[0]
        places[index] = _StorageInfo(first.path, first.offset_bytes, first.length_bytes)
        chunks = tuple(piece for piece in item.pieces if isinstance(piece, ChunkRecord))
        if len(chunks) > 1:
            cut.setdefault(index.fqn, {})[chunks[0].offsets] = chunks
        for piece in chunks[1:]:
            place = MetadataIndex(index.fqn, torch.Size(piece.offsets))
            places[place] = _StorageInfo(piece.path, piece.offset_bytes, piece.length_bytes)
    entries = dict(placed.state_dict_metadata)
    for fqn, by_offsets in cut.items():
        entry = entries[fqn]
        assert isinstance(entry, TensorStorageMetadata)
        entries[fqn] = replace(entry, chunks=_cut(entry.chunks, by_offsets))
    return Metadata(
        state_dict_metadata=entries,
        planner_data=placed.planner_data,
        storage_data=places,
        version=placed.version,
    )


def _cut(
    chunks: Sequence[ChunkStorageMetadata], by_offsets: Mapping[tuple[int, ...], tuple[ChunkRecord, ...]]
) -> list[ChunkStorageMetadata]:
    found = []
    for chunk in chunks:
        pieces = by_offsets.get(tuple(chunk.offsets))
        if pieces is None:
            found.append(chunk)
            continue
        found += [
            ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.sizes))
            for piece in pieces
        ]
    return found
