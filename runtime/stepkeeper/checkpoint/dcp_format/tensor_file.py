"""Lay out a tensor file: one tensor as torch.save writes it, in a zip archive.

The size of the file and the offset of its data follow from dtype and shape.
A ranged read of the data gives the tensor's bytes, row-major and little-endian, without unzipping.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from isal import isal_zlib

from stepkeeper.checkpoint.dcp_format.dtypes import find_dtype, size_in_bytes
from stepkeeper.checkpoint.dcp_format.pickle_writer import Call, Global, Persistent, encode_pickle

__all__ = ["TensorFileLayout", "frame_tensor_file", "lay_out_tensor_file"]

_ALIGNMENT: Final = 64
"""The alignment that torch uses, so that a mapped file can be used in place."""

_ZIP64: Final = 45
_UTF8: Final = 0x0800
_IN_EXTRA: Final = 0xFFFFFFFF
_DATA_NAME: Final = b"archive/data/0"
_CRC_IN_HEADER: Final = 14
_CRC_IN_ENTRY: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFileLayout:
    """Sizes and offsets in a tensor file."""

    data_offset_bytes: int
    data_bytes: int
    length_bytes: int
    """Length of the whole tensor file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    name: bytes
    crc32: int
    size_bytes: int
    header_offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """A tensor file without its data and the data's checksum, which is both before and after the data."""

    layout: TensorFileLayout
    before: tuple[bytes, bytes]
    after: tuple[bytes, bytes]


def lay_out_tensor_file(dtype: str, sizes: tuple[int, ...]) -> TensorFileLayout:
    """Compute the sizes and offsets of the file of such a tensor."""
    return _build_frame(dtype, sizes).layout


def frame_tensor_file(dtype: str, sizes: tuple[int, ...], crc32: int) -> tuple[bytes, bytes]:
    """Return the bytes of the tensor file before and after its data, which has this crc-32."""
    frame, crc = _build_frame(dtype, sizes), struct.pack("<I", crc32)
    return crc.join(frame.before), crc.join(frame.after)


@lru_cache(maxsize=4096)
def _build_frame(dtype: str, sizes: tuple[int, ...]) -> _Frame:
    head, records = _build_head(dtype, sizes)
    data_bytes = size_in_bytes(dtype, sizes)
    # Fields have fixed widths: any checksum gives the same lengths.
    record = _Record(name=_DATA_NAME, crc32=0, size_bytes=data_bytes, header_offset_bytes=len(head))
    header = _build_header(record, padded_to=_count_header_bytes(len(head)))
    offset = len(head) + len(header)
    tail = _build_tail([*records, record], offset + data_bytes)
    layout = TensorFileLayout(
        data_offset_bytes=offset, data_bytes=data_bytes, length_bytes=offset + data_bytes + len(tail)
    )
    in_tail = sum(len(_build_directory_entry(each)) for each in records) + _CRC_IN_ENTRY
    return _Frame(
        layout=layout,
        before=_split_at_crc(head + header, len(head) + _CRC_IN_HEADER),
        after=_split_at_crc(tail, in_tail),
    )


def _split_at_crc(data: bytes, place: int) -> tuple[bytes, bytes]:
    return data[:place], data[place + 4 :]


def _build_head(dtype: str, sizes: tuple[int, ...]) -> tuple[bytes, tuple[_Record, ...]]:
    """Build all records before the data, each with its header."""
    contents = {b"archive/data.pkl": _pickle_tensor(dtype, sizes), b"archive/byteorder": b"little"}
    contents[b"archive/version"] = b"3\n"
    head, records = b"", []
    for name, content in contents.items():
        record = _Record(
            name=name, crc32=isal_zlib.crc32(content), size_bytes=len(content), header_offset_bytes=len(head)
        )
        head += _build_header(record) + content
        records.append(record)
    return head, tuple(records)


def _pickle_tensor(dtype: str, sizes: tuple[int, ...]) -> bytes:
    kind = find_dtype(dtype)
    n_items = size_in_bytes(dtype, sizes) // kind.item_bytes
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= max(size, 1)
    # A storage class that older torch knows, or an untyped storage and, last, the dtype.
    storage, n_stored, last = Global("torch.storage", "UntypedStorage"), n_items * kind.item_bytes, [dtype]
    if kind.storage is not None:
        storage, n_stored, last = Global("torch", kind.storage), n_items, []
    identity = Persistent(("storage", storage, "0", "cpu", n_stored))
    hooks = Call(Global("collections", "OrderedDict"), ())
    arguments = (identity, 0, sizes, tuple(reversed(strides)), False, hooks)
    function = Global("torch._utils", "_rebuild_tensor_v3" if last else "_rebuild_tensor_v2")
    return encode_pickle(Call(function, (*arguments, *(Global("torch", name) for name in last))))


def _count_header_bytes(header_offset_bytes: int) -> int:
    """Compute the length of the data's header that aligns the data; it includes room for a padding field."""
    least = 30 + len(_DATA_NAME) + 20 + 4
    end = -(-(header_offset_bytes + least) // _ALIGNMENT) * _ALIGNMENT
    return end - header_offset_bytes


def _build_header(record: _Record, padded_to: int = 0) -> bytes:
    """Build a record's header. The sizes are always in the zip64 field, even for small records."""
    extra = struct.pack("<HHQQ", 1, 16, record.size_bytes, record.size_bytes)
    if padded_to:
        padding = padded_to - 30 - len(record.name) - len(extra) - 4
        extra += struct.pack("<HH", 0x4246, padding) + b"\0" * padding
    sizes = (_IN_EXTRA, _IN_EXTRA, len(record.name), len(extra))
    return (
        struct.pack("<4sHHHHHIIIHH", b"PK\3\4", _ZIP64, _UTF8, 0, 0, 0, record.crc32, *sizes)
        + record.name
        + extra
    )


def _build_tail(records: list[_Record], offset_bytes: int) -> bytes:
    """Build the central directory, which begins at `offset_bytes`, and its end."""
    directory = b"".join(_build_directory_entry(record) for record in records)
    end = offset_bytes + len(directory)
    place = (len(records), len(records), len(directory), offset_bytes)
    return (
        directory
        + struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, _ZIP64, _ZIP64, 0, 0, *place)
        + struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
        + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, _IN_EXTRA, _IN_EXTRA, 0)
    )


def _build_directory_entry(record: _Record) -> bytes:
    extra = struct.pack("<HHQQ", 1, 16, record.size_bytes, record.size_bytes)
    lengths = (_IN_EXTRA, _IN_EXTRA, len(record.name), len(extra))
    return (
        struct.pack("<4sHHHHHHIIIHHH", b"PK\1\2", _ZIP64, _ZIP64, _UTF8, 0, 0, 0, record.crc32, *lengths, 0)
        + struct.pack("<HHII", 0, 0, 0, record.header_offset_bytes)
        + record.name
        + extra
    )
