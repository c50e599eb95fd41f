"""What a rank's saves have in common as long as the state is built alike: laid out and encoded once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from stepkeeper.checkpoint.dcp_format.tensor_file import blob_layout
from stepkeeper.checkpoint.manifest import ChunkRecord, Inventory, TensorRecord, ValueRecord
from stepkeeper.checkpoint.orders import SaveOrder, TensorOrder, ValueOrder
from stepkeeper.checkpoint.packing import File, Item, packed

__all__ = ["Layout", "Part", "Recurring", "inventory_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which objects a rank's share of a save becomes, and what its manifest says is in them."""

    files: tuple[File, ...]
    inventory: Inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank's manifest adds to `.metadata`."""

    inventory: bytes
    """Its digest."""

    aliases: Mapping[str, str]


@final
class Recurring:
    """Of the last save, and good for what is equal to it: nothing is taken from here without a comparison."""

    def __init__(self) -> None:
        self._layout: tuple[object, Layout] | None = None
        self._metadata: tuple[object, bytes] | None = None

    def layout(self, order: SaveOrder, *, streams: int, least_bytes: int) -> Layout:
        """As `packed` has it."""
        key = (order.rank, order.tensors, order.values, streams, least_bytes)
        if self._layout is None or self._layout[0] != key:
            self._layout = None
            files = packed(order, streams=streams, least_bytes=least_bytes)
            self._layout = key, Layout(files=files, inventory=inventory_of(files))
        return self._layout[1]

    def metadata(self, parts: Sequence[Part], key_paths: str | None, made: Callable[[], bytes]) -> bytes:
        """What `made` returns for these, whenever it was."""
        key = (tuple(parts), key_paths)
        if self._metadata is None or self._metadata[0] != key:
            self._metadata = None
            self._metadata = key, made()
        return self._metadata[1]


def inventory_of(files: Sequence[File]) -> Inventory:
    """What is in these objects."""
    chunks: dict[str, list[ChunkRecord]] = {}
    first: dict[str, TensorOrder] = {}
    values: list[ValueRecord] = []
    for file in files:
        for item in file.items:
            record = _record_of(file.name, item)
            if isinstance(record, ValueRecord):
                values.append(record)
            else:
                assert isinstance(item.order, TensorOrder)
                first.setdefault(item.order.fqn, item.order)
                chunks.setdefault(item.order.fqn, []).append(record)
    tensors = (
        TensorRecord(fqn=fqn, dtype=order.dtype, global_shape=order.global_shape, chunks=tuple(chunks[fqn]))
        for fqn, order in first.items()
    )
    return Inventory(tensors=tuple(tensors), values=tuple(values))


def _record_of(path: str, item: Item) -> ChunkRecord | ValueRecord:
    """Where what was ordered is, in the object at `path`."""
    order, offset_bytes = item.order, item.offset_bytes
    if isinstance(order, ValueOrder):
        return ValueRecord(
            fqn=order.fqn, path=path, offset_bytes=offset_bytes, length_bytes=order.length_bytes
        )
    layout = blob_layout(order.dtype, order.sizes)
    return ChunkRecord(
        offsets=order.offsets,
        sizes=order.sizes,
        path=path,
        offset_bytes=offset_bytes,
        length_bytes=layout.length_bytes,
        data_offset_bytes=layout.data_offset_bytes,
    )
