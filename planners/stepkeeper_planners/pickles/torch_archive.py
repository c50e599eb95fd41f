"""Open the archive that torch.save writes: a zip file of a pickle and the tensors' storages."""

import struct
import sys
import zipfile
import zlib
from dataclasses import dataclass
from typing import BinaryIO, Final

import torch

from stepkeeper_planners.errors import PickleRefusedError

__all__ = ["ZIP_MAGIC", "Storage", "StorageKind", "TorchArchive"]

ZIP_MAGIC: Final = b"PK\x03\x04"
"""The first bytes of a record, and so of the file."""
_LOCAL_HEADER_BYTES: Final = 30
"""The size of the header before a record's name."""

# zipfile raises these on bytes that aren't an archive, or a broken one.
_BAD_ZIP: Final = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, LookupError, OSError)


@dataclass(frozen=True, slots=True)
class StorageKind:
    """A storage's class: it determines the dtype of its bytes."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    dtype: torch.dtype
    content: torch.Tensor
    """Its bytes."""


class TorchArchive:
    """Read the records of a zip file that torch wrote: uncompressed, in one folder."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file, self._size_bytes = file, size_bytes
        self._storages: dict[str, tuple[StorageKind, Storage]] = {}
        try:
            self._zip = zipfile.ZipFile(file)
        except _BAD_ZIP as error:
            raise PickleRefusedError(f"it isn't an archive ({error})") from error
        entries = self._zip.infolist()
        self.names = frozenset(entry.filename for entry in entries)
        if len(self.names) != len(entries):
            raise PickleRefusedError("two of its records have the same name")
        # If records were compressed or overlapped, a few bytes might become very many.
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
            raise PickleRefusedError("one of its records is compressed or encrypted")
        if sum(entry.file_size for entry in entries) > size_bytes:
            raise PickleRefusedError("its records are larger than the file")
        roots = [name.removesuffix("data.pkl") for name in self.names if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise PickleRefusedError("it has no data.pkl, or several")
        self.root = roots[0]
        if f"{self.root}byteorder" in self.names and self.record("byteorder") != sys.byteorder.encode():
            raise PickleRefusedError(f"it was written by a machine that isn't {sys.byteorder}-endian")

    def entry(self, name: str) -> zipfile.ZipInfo:
        """Return the zip entry of a record."""
        try:
            return self._zip.getinfo(self.root + name)
        except KeyError as error:
            raise PickleRefusedError(f"record {name} is missing") from error

    def locate_record(self, name: str) -> tuple[int, int]:
        """Return the offset of a record's first byte, and the number of its bytes."""
        entry = self.entry(name)
        if not 0 <= entry.header_offset <= self._size_bytes:
            raise PickleRefusedError(f"record {name} can't be read: it would begin outside of the file")
        self._file.seek(entry.header_offset)
        header = self._file.read(_LOCAL_HEADER_BYTES)
        if len(header) < _LOCAL_HEADER_BYTES or not header.startswith(ZIP_MAGIC):
            raise PickleRefusedError(f"record {name} isn't where it should be")
        name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
        start = entry.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if start + entry.file_size > self._size_bytes:
            raise PickleRefusedError(f"record {name} extends past the end of the file")
        return start, entry.file_size

    def record(self, name: str) -> bytes | memoryview:
        """Read the bytes of a record."""
        # Newer Pythons' zipfile refuses an entry for fields that nothing here relies on.
        start, n_bytes = self.locate_record(name)
        self._file.seek(start)
        read = self._file.read(n_bytes)
        if zlib.crc32(read) != self.entry(name).CRC:
            raise PickleRefusedError(f"record {name} can't be read: its checksum is wrong")
        return read

    def content(self, name: str) -> torch.Tensor:
        """Read the bytes of a record into a tensor."""
        read = self.record(name)
        if not read:
            # frombuffer() refuses an empty buffer.
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(read), dtype=torch.uint8)

    def storage(self, identity: object) -> Storage:
        """Return the storage that a pickle refers to by this persistent id. Each record is read once."""
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            raise PickleRefusedError("it refers to something that isn't a storage")
        _, kind, key, _, length = identity
        if type(kind) is not StorageKind or type(key) is not str or not key.isdecimal():
            raise PickleRefusedError("it refers to a storage of an unknown kind")
        if key not in self._storages:
            self._storages[key] = (kind, Storage(kind.dtype, self.content(f"data/{key}")))
        first_kind, storage = self._storages[key]
        # Two tensors may share a storage, and name its class and length both times.
        if kind != first_kind or length != storage.content.numel() // kind.dtype.itemsize:
            raise PickleRefusedError(f"storage {key} has the wrong size")
        return storage
