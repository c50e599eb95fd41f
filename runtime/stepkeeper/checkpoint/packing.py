"""Pack a rank's share of a save into objects of equal size, so that parallel uploads end together. Pure."""

import sys
from dataclasses import dataclass
from math import ceil
from typing import Final

from stepkeeper.checkpoint.dcp_format.dtypes import size_in_bytes
from stepkeeper.checkpoint.dcp_format.tensor_file import lay_out_tensor_file
from stepkeeper.checkpoint.orders import SaveOrder, TensorOrder, ValueOrder

__all__ = ["File", "Item", "pack_order"]

_MAX_BYTES: Final = 512 * 1024 * 1024
"""The size from which a rank writes more objects instead of larger ones."""

_TOLERANCE: Final = 128
"""An object's size may deviate by one part in this many before a tensor is cut."""

_LEAST_PIECE_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A tensor file or a value, and its place in an object."""

    order: TensorOrder | ValueOrder
    offset_bytes: int
    """Offset in the object."""

    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """An object to write: its name, and its tensor files and values in order."""

    name: str
    items: tuple[Item, ...]


def pack_order(order: SaveOrder, *, streams: int, least_bytes: int) -> tuple[File, ...]:
    """Pack a rank's share into objects of equal size; a multiple of `streams` of them if there is enough data.

    A tensor that doesn't fit is cut along its first axes, and each piece is a chunk of its own. Values are
    never cut. If there are several objects, each has at least `least_bytes`.
    """
    # Popped from the end: first the tensors, then the values.
    waiting: list[TensorOrder | ValueOrder] = [*reversed(order.values), *reversed(order.tensors)]
    total_bytes = sum(map(_length_bytes, waiting))
    packing = _Packing(total_bytes, _count_files(total_bytes, streams, least_bytes))
    while waiting:
        item = waiting.pop()
        size_bytes, room_bytes = _length_bytes(item), packing.room_bytes
        if size_bytes > room_bytes + packing.tolerance_bytes:
            pieces = _cut_tensor(item, room_bytes) if room_bytes > packing.tolerance_bytes else ()
            if pieces:
                waiting += reversed(pieces)
                continue
            # It stays whole, in the object whose size then deviates less.
            if room_bytes < size_bytes / 2:
                packing.start_next_file()
        packing.place_item(item, size_bytes)
    return tuple(
        File(name=f"__{order.rank}_{n}.distcp", items=tuple(items)) for n, items in enumerate(packing.files)
    )


class _Packing:
    """Fill objects up to evenly spaced ends: if one gets too much, the next gets less."""

    def __init__(self, total_bytes: int, n_files: int) -> None:
        self._total_bytes, self._n_files = total_bytes, n_files
        self._n_ended = self._position = self._offset = 0
        """The number of objects that are full, and the next item's place in the whole share and in its object."""

        self.tolerance_bytes = max(total_bytes // n_files // _TOLERANCE, _LEAST_PIECE_BYTES)
        self.files: list[list[Item]] = []

    @property
    def room_bytes(self) -> int:
        """Bytes left in the object that is being filled; the last one takes everything that is left."""
        if self._n_ended + 1 >= self._n_files:
            return sys.maxsize
        return self._total_bytes * (self._n_ended + 1) // self._n_files - self._position

    def place_item(self, order: TensorOrder | ValueOrder, size_bytes: int) -> None:
        if self._offset == 0:
            self.files.append([])
        self.files[-1].append(Item(order=order, offset_bytes=self._offset, length_bytes=size_bytes))
        self._position += size_bytes
        self._offset += size_bytes
        # An item that couldn't be cut may take the room of several objects.
        while self.room_bytes <= self.tolerance_bytes:
            self.start_next_file()

    def start_next_file(self) -> None:
        self._n_ended += 1
        self._offset = 0


def _count_files(total_bytes: int, streams: int, least_bytes: int) -> int:
    if total_bytes > streams * least_bytes:
        return streams * ceil(total_bytes / (streams * _MAX_BYTES))
    return max(ceil(total_bytes / least_bytes), 1)


def _length_bytes(order: TensorOrder | ValueOrder) -> int:
    """Compute the length of the tensor file or value."""
    if isinstance(order, ValueOrder):
        return order.length_bytes
    return lay_out_tensor_file(order.dtype, order.sizes).length_bytes


def _cut_tensor(order: TensorOrder | ValueOrder, room_bytes: int) -> tuple[TensorOrder, ...]:
    """Cut a tensor into ordered parts so that the first fits. Return none if no part worth writing fits."""
    if isinstance(order, ValueOrder) or room_bytes < _LEAST_PIECE_BYTES:
        return ()
    axis = next((axis for axis, size in enumerate(order.sizes) if size > 1), None)
    if axis is None:
        return ()
    data_bytes = size_in_bytes(order.dtype, order.sizes)
    row_bytes = data_bytes // order.sizes[axis]
    overhead_bytes = _length_bytes(order) - data_bytes
    n_rows = min((room_bytes - overhead_bytes) // row_bytes if row_bytes else 0, order.sizes[axis] - 1)
    if n_rows > 0:
        return _take_rows(order, axis, 0, n_rows), _take_rows(order, axis, n_rows, order.sizes[axis])
    # Not even one row fits: cut the first row along the next axis.
    first, rest = _take_rows(order, axis, 0, 1), _take_rows(order, axis, 1, order.sizes[axis])
    pieces = _cut_tensor(first, room_bytes)
    return (*pieces, rest) if pieces else ()


def _take_rows(order: TensorOrder, axis: int, first: int, end: int) -> TensorOrder:
    """Take rows of the first axis that has more than one. They are contiguous in memory."""
    row_bytes = size_in_bytes(order.dtype, order.sizes) // order.sizes[axis]
    return order._replace(
        offsets=(*order.offsets[:axis], order.offsets[axis] + first, *order.offsets[axis + 1 :]),
        sizes=(*order.sizes[:axis], end - first, *order.sizes[axis + 1 :]),
        start=order.start + first * row_bytes,
    )
