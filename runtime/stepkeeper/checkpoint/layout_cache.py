"""Cache the structure of a rank's last save, the layout of its objects, and the encoded `.metadata`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from stepkeeper.checkpoint.dcp_format.tensor_file import lay_out_tensor_file
from stepkeeper.checkpoint.inventory import ChunkRecord, Inventory, TensorRecord, ValueRecord
from stepkeeper.checkpoint.orders import SaveOrder, Structure, TensorOrder, ValueOrder
from stepkeeper.checkpoint.packing import File, Item, pack_order

__all__ = ["Layout", "LayoutCache", "Part", "build_inventory", "lay_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The objects that a rank's share of a save becomes, and the inventory that lists their contents."""

    files: tuple[File, ...]
    inventory: Inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's contribution to `.metadata`."""

    inventory: bytes
    """SHA-256 of the rank's inventory."""

    aliases: Mapping[str, str]


@final
class LayoutCache:
    """Cache the layout of a rank's objects and the whole `.metadata` between saves, with the structure.

    Each holds the newest result only, which is dropped before the next is computed, and is reused for equal inputs:
    - of the layout: the rank, the structure and the values, and the number and minimum size of the objects;
    - of `.metadata`: the structure, and the parts of all ranks, whose structures this process doesn't have.
    """

    def __init__(self) -> None:
        self._structure: Structure | None = None
        self._layout: tuple[object, Layout] | None = None
        self._metadata: tuple[object, bytes] | None = None

    def hold_structure(self, structure: Structure) -> None:
        """Replace the cached structure."""
        self._structure = structure

    def find_structure(self, key: str) -> Structure | None:
        """Return the cached structure if it has this key."""
        held = self._structure
        return held if held is not None and held.key == key else None

    def get_layout(self, order: SaveOrder, *, streams: int, least_bytes: int) -> Layout:
        """Return the layout of the order's objects; see `pack_order`."""
        key = (order.rank, order.structure.key, order.values, streams, least_bytes)
        if self._layout is None or self._layout[0] != key:
            self._layout = None
            self._layout = key, lay_out(order, streams=streams, least_bytes=least_bytes)
        return self._layout[1]

    def get_metadata(
        self, structure_key: str | None, parts: Sequence[Part], encode: Callable[[], bytes]
    ) -> bytes:
        """Return the encoded `.metadata` of these parts. Call `encode` unless the last call had the same parts."""
        key = (structure_key, tuple(parts))
        if self._metadata is None or self._metadata[0] != key:
            self._metadata = None
            self._metadata = key, encode()
        return self._metadata[1]


def lay_out(order: SaveOrder, *, streams: int, least_bytes: int) -> Layout:
    """Lay out the order's objects; see `pack_order`."""
    files = pack_order(order, streams=streams, least_bytes=least_bytes)
    return Layout(files=files, inventory=build_inventory(files))


def build_inventory(files: Sequence[File]) -> Inventory:
    """List the contents of these objects."""
    chunks: dict[str, list[ChunkRecord]] = {}
    first: dict[str, TensorOrder] = {}
    values: list[ValueRecord] = []
    for file in files:
        for item in file.items:
            record = _build_record(file.name, item)
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


def _build_record(path: str, item: Item) -> ChunkRecord | ValueRecord:
    """Build the record of an item in the object at `path`."""
    order, offset_bytes = item.order, item.offset_bytes
    if isinstance(order, ValueOrder):
        return ValueRecord(
            fqn=order.fqn, path=path, offset_bytes=offset_bytes, length_bytes=order.length_bytes
        )
    layout = lay_out_tensor_file(order.dtype, order.sizes)
    return ChunkRecord(
        offsets=order.offsets,
        sizes=order.sizes,
        path=path,
        offset_bytes=offset_bytes,
        length_bytes=layout.length_bytes,
        data_offset_bytes=layout.data_offset_bytes,
    )
