# mypy: disable-error-code="explicit-override"
# typing has override from Python 3.12 on.
"""Assemble an object from a rank's data in memory. A frame is the rest of a tensor file around its elements."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol, final, overload

from isal import isal_zlib

from stepkeeper.checkpoint.dcp_format.dtypes import size_in_bytes
from stepkeeper.checkpoint.dcp_format.tensor_file import frame_tensor_file
from stepkeeper.checkpoint.orders import TensorOrder, ValueOrder
from stepkeeper.checkpoint.packing import File
from stepkeeper.storage.base import Buffer, flat_view

__all__ = ["FileParts", "RankData"]


class RankData(Protocol):
    """The bytes that a rank's orders refer to, as one range. Any thread may read a part."""

    def __getitem__(self, span: slice, /) -> memoryview: ...


@final
class FileParts(Sequence[Buffer]):
    """The parts of one object, in order.

    The data is read once and not copied. Each iteration builds the frames again: a frame takes more than a
    kilobyte, so keeping those of many small tensors would take almost as much memory as their data.
    """

    def __init__(self, file: File, data: RankData) -> None:
        """Collect the data of all items. Raises ValueError if `data` ends before."""
        self._file = file
        self._data: list[memoryview] = []
        self._crcs = array("I")
        """crc-32 of each piece; 0 for values, which contain their own."""

        for item in file.items:
            order = item.order
            length_bytes = _data_bytes(order)
            piece = data[order.start : order.start + length_bytes]
            if piece.nbytes != length_bytes:
                raise ValueError(
                    f"{order.fqn} has {length_bytes} bytes from {order.start} on, got {piece.nbytes}"
                )
            self._data.append(flat_view(piece))
            self._crcs.append(isal_zlib.crc32(self._data[-1]) if isinstance(order, TensorOrder) else 0)

    def __iter__(self) -> Iterator[Buffer]:
        """Yield the data of all items, and one part before, between and after them, even if that is empty."""
        pending = b""
        for item, piece, crc in zip(self._file.items, self._data, self._crcs, strict=True):
            before, after = b"", b""
            if isinstance(item.order, TensorOrder):
                before, after = frame_tensor_file(item.order.dtype, item.order.sizes, crc)
            yield pending + before
            yield piece
            pending = after
        yield pending

    def __len__(self) -> int:
        return 2 * len(self._data) + 1

    @overload
    def __getitem__(self, index: int) -> Buffer: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Buffer]: ...

    def __getitem__(self, index: int | slice) -> Buffer | Sequence[Buffer]:
        return list(self)[index]


def _data_bytes(order: TensorOrder | ValueOrder) -> int:
    if isinstance(order, ValueOrder):
        return order.length_bytes
    return size_in_bytes(order.dtype, order.sizes)
