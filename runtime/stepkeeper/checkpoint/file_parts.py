# mypy: disable-error-code="explicit-override"
# typing has override from Python 3.12 on.
"""What an object is put together from: a rank's data as it lies in memory, and what stands between its pieces."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol, final, overload

from isal import isal_zlib

from stepkeeper.checkpoint.dcp_format.dtypes import size_in_bytes
from stepkeeper.checkpoint.dcp_format.tensor_file import blob_frame
from stepkeeper.checkpoint.orders import TensorOrder, ValueOrder
from stepkeeper.checkpoint.packing import File
from stepkeeper.storage.base import Buffer

__all__ = ["FileParts", "RankData"]


class RankData(Protocol):
    """The bytes that a rank's orders are about, as one range; any thread may ask for a part."""

    def __getitem__(self, span: slice, /) -> memoryview: ...


@final
class FileParts(Sequence[Buffer]):
    """Data is asked for once, and not copied. What frames a tensor is made whenever it is come to.

    It is more than a kilobyte: of very many small tensors at a time it would be a good part of what they take.
    """

    def __init__(self, file: File, data: RankData) -> None:
        """Raises ValueError if `data` ends before all that is ordered of it."""
        self._file = file
        self._data: list[memoryview] = []
        self._crcs = array("I")
        """crc-32 of each; those of values are in their own bytes."""

        for item in file.items:
            order = item.order
            length_bytes = _data_bytes(order)
            piece = data[order.start : order.start + length_bytes]
            if piece.nbytes != length_bytes:
                raise ValueError(
                    f"{order.fqn} has {length_bytes} bytes from {order.start} on, got {piece.nbytes}"
                )
            self._data.append(piece.cast("B") if piece.nbytes else memoryview(b""))
            self._crcs.append(isal_zlib.crc32(self._data[-1]) if isinstance(order, TensorOrder) else 0)

    def __iter__(self) -> Iterator[Buffer]:
        """What is between two tensors' data is one part."""
        behind = b""
        for item, piece, crc in zip(self._file.items, self._data, self._crcs, strict=True):
            before, after = b"", b""
            if isinstance(item.order, TensorOrder):
                before, after = blob_frame(item.order.dtype, item.order.sizes, crc)
            yield behind + before
            yield piece
            behind = after
        yield behind

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
