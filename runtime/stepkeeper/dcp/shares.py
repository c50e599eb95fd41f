"""Convert a rank's part of a torch save plan to this package's objects, and describe all of it in `.metadata`."""

import pickle
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
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from typing_extensions import override

from stepkeeper.checkpoint.dcp_format.dtypes import size_in_bytes
from stepkeeper.checkpoint.inventory import ChunkRecord, Inventory, ValueRecord
from stepkeeper.checkpoint.manifest import Manifest, ObjectRecord
from stepkeeper.checkpoint.orders import TensorOrder, ValueOrder
from stepkeeper.checkpoint.packing import File
from stepkeeper.errors import SaveError
from stepkeeper_planners.dtypes import dtype_name

__all__ = ["Share", "WrittenItem", "add_storage_places", "join_manifests", "pickle_metadata"]

Resolve = Callable[[WriteItem], Any]
"""A planner's `resolve_data`: returns the data of an item."""

_N_PROPERTIES: Final = 5
"""torch up to 2.14 accepts exactly this many properties of a tensor. 2.15 adds the strides, which no reader uses:
tensors are stored row by row.
"""

_ALIGNMENT_BYTES: Final = 64
"""Each item begins at another multiple of this, even after one without bytes: its start identifies it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenItem:
    """An item that was written, as a rank describes it to the coordinator."""

    pieces: tuple[ChunkRecord | ValueRecord, ...]
    """Places where it is stored, in order; several if a tensor was cut."""

    manifest: Manifest | None = None
    """Manifest of everything that the rank wrote; comes with the rank's first item."""


@dataclass(slots=True, kw_only=True)
class _Item:
    """An item of the plan, and its place in the share."""

    item: WriteItem
    order: TensorOrder | ValueOrder
    n_unread: int
    """The number of its bytes that are still to be read. Each is read once."""

    data: memoryview | None = None
    """Its bytes, from the first read of them to the last."""


@final
class Share:
    """A rank's items as one range of bytes. Each tensor is resolved when it is written, and released after that."""

    def __init__(self, items: Sequence[WriteItem], resolve: Resolve) -> None:
        """Lay out the rank's items of the plan. Raises ValueError for a dtype that can't be saved."""
        self._resolve = resolve
        self._items: list[_Item] = []
        self._lock = threading.Lock()
        start = 0
        for item in items:
            made = self._make_item(item, start)
            self._items.append(made)
            start += -(-max(made.n_unread, 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._starts = [made.order.start for made in self._items]

    @property
    def tensors(self) -> tuple[TensorOrder, ...]:
        """The tensors' parts, with their places in the range."""
        return tuple(made.order for made in self._items if isinstance(made.order, TensorOrder))

    @property
    def values(self) -> tuple[ValueOrder, ...]:
        """The values, with their places in the range."""
        return tuple(made.order for made in self._items if isinstance(made.order, ValueOrder))

    def __getitem__(self, span: slice, /) -> memoryview:
        """Return bytes of one item. Raises SaveError if the planner returns other elements than planned."""
        made = self._item_at(span.start)
        with self._lock:
            # Only one thread at a time calls the planner, as torch's own writers do by default.
            if made.data is None:
                made.data = _elements(made.order, self._resolve(made.item))
            part = made.data[span.start - made.order.start : span.stop - made.order.start]
            made.n_unread -= span.stop - span.start
            if made.n_unread <= 0:
                made.data = None
        return part

    def locate_items(self, files: Iterable[File], manifest: Manifest) -> list[tuple[WriteItem, WrittenItem]]:
        """Find where each item is stored, for the coordinator, and return both in the order of the plan."""
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
            return _Item(item=item, order=order, n_unread=data.nbytes, data=data)
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
        return _Item(item=item, order=tensor, n_unread=size_in_bytes(tensor.dtype, tensor.sizes))


def _elements(order: TensorOrder | ValueOrder, resolved: Any) -> memoryview:
    """Return a tensor's elements as row-major bytes, without a copy if they are laid out so already."""
    assert isinstance(order, TensorOrder)
    assert isinstance(resolved, torch.Tensor)
    tensor = resolved.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if tuple(tensor.shape) != order.sizes or dtype_name(tensor.dtype) != order.dtype:
        raise SaveError(
            f"{order.fqn}: the planner planned {order.dtype}{list(order.sizes)}, but returned "
            f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
        )
    if not prod(order.sizes):
        return memoryview(b"")
    flat: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.data


def join_manifests(written: Iterable[WrittenItem], *, nonce: str, more: Sequence[ObjectRecord]) -> Manifest:
    """Join the ranks' manifests and the objects `more` to one manifest that stands alone."""
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
    """Return the metadata with where everything is stored, as torch's FileSystemReader understands it.

    Each piece of a tensor that was cut becomes a chunk. `metadata` isn't changed: planners keep theirs.
    """
    placed = replace(metadata)
    # Assigning checks, in our planner's metadata, that nothing is lacking, and adds the further names of tied tensors.
    placed.storage_data = dict(written)
    places: dict[MetadataIndex, _StorageInfo] = {}
    cut: dict[str, dict[tuple[int, ...], tuple[ChunkRecord, ...]]] = {}
    """The pieces of each chunk that was cut, by the tensor's name and the chunk's offsets."""
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
        entries[fqn] = replace(entry, chunks=_cut_chunks(entry.chunks, by_offsets))
    return Metadata(
        state_dict_metadata=entries,
        planner_data=placed.planner_data,
        storage_data=places,
        version=placed.version,
    )


def _cut_chunks(
    chunks: Sequence[ChunkStorageMetadata], by_offsets: Mapping[tuple[int, ...], tuple[ChunkRecord, ...]]
) -> list[ChunkStorageMetadata]:
    """Replace each chunk that was cut by its pieces."""
    found = []
    for chunk in chunks:
        pieces = [
            ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.sizes))
            for piece in by_offsets.get(tuple(chunk.offsets), ())
        ]
        found += pieces or [chunk]
    return found


def pickle_metadata(metadata: Metadata) -> bytes:
    """Pickle torch's Metadata for `.metadata`, so that every torch since 2.9 reads it, whichever version made it."""
    out = BytesIO()
    _Pickler(out).dump(metadata)
    return out.getvalue()


class _Pickler(pickle.Pickler):
    """Pickle the properties of tensors with the fields that every torch reads."""

    @override
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not TensorProperties:
            return NotImplemented
        reduced = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        assert not isinstance(reduced, str)
        made, arguments, state, *_ = reduced
        return made, arguments, state[:_N_PROPERTIES]
