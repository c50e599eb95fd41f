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
"""The version of zip that a reader needs, and the flag for names in UTF-8."""

_IN_EXTRA: Final = 0xFFFFFFFF
"""Stands for a number that is in a zip64 field or record."""

_HEADER_BYTES: Final = 30
_SIZES_BYTES: Final = 20
_PADDING_HEAD_BYTES: Final = 4
"""The lengths of a record's header without its name and fields, of its zip64 field, and of the head of its padding."""

_CRC_IN_HEADER: Final = 14
_CRC_IN_ENTRY: Final = 16
"""The offsets of a record's crc-32 in its header, and in its entry of the directory."""

_DATA_NAME: Final = b"archive/data/0"


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
    """A tensor file without its data and the data's checksum."""

    layout: TensorFileLayout
    before: tuple[bytes, bytes]
    after: tuple[bytes, bytes]
    """The bytes before the data, and those after it: each as two parts, with the checksum between them."""


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
    n_bytes = size_in_bytes(dtype, sizes)
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= max(size, 1)
    storage, n_stored, function = Global("torch.storage", "UntypedStorage"), n_bytes, "_rebuild_tensor_v3"
    more: tuple[Global, ...] = (Global("torch", dtype),)
    if kind.storage is not None:
        # This class stands for the dtype, and older torch knows it. It counts items instead of bytes.
        storage, n_stored = Global("torch", kind.storage), n_bytes // kind.item_bytes
        function, more = "_rebuild_tensor_v2", ()
    identity = Persistent(("storage", storage, "0", "cpu", n_stored))
    hooks = Call(Global("collections", "OrderedDict"), ())
    arguments = (identity, 0, sizes, tuple(reversed(strides)), False, hooks, *more)
    return encode_pickle(Call(Global("torch._utils", function), arguments))


def _count_header_bytes(header_offset_bytes: int) -> int:
    """Compute the length of the data's header, which a padding field extends so that the data is aligned."""
    least = _HEADER_BYTES + len(_DATA_NAME) + _SIZES_BYTES + _PADDING_HEAD_BYTES
    end = -(-(header_offset_bytes + least) // _ALIGNMENT) * _ALIGNMENT
    return end - header_offset_bytes


def _build_header(record: _Record, padded_to: int = 0) -> bytes:
    """Build a record's header. The sizes are in the zip64 field, even for small records."""
    extra = struct.pack("<HHQQ", 1, 16, record.size_bytes, record.size_bytes)
    if padded_to:
        padding = padded_to - _HEADER_BYTES - len(record.name) - len(extra) - _PADDING_HEAD_BYTES
        # torch's own mark of padding, "FB".
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
