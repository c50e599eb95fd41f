"""Where the records of a torch.save file lie, which are not read."""

import struct
from typing import BinaryIO, Final

from stepkeeper_planners.errors import PickleRefusedError
from stepkeeper_planners.pickles.torch_files import TorchArchive

__all__ = ["LOCAL_HEADER_BYTES", "ZIP_MAGIC", "SeekableArchive"]

ZIP_MAGIC: Final = b"PK\x03\x04"
"""What a record begins with, and so the file."""
LOCAL_HEADER_BYTES: Final = 30
"""Before a record's name."""


class SeekableArchive(TorchArchive):
    """Says where a record's bytes are."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        super().__init__(file, size_bytes)
        self._file, self._size_bytes = file, size_bytes

    def locate_record(self, name: str) -> tuple[int, int]:
        """The first byte of a record, and how many it has."""
        entry = self.entry(name)
        self._file.seek(entry.header_offset)
        header = self._file.read(LOCAL_HEADER_BYTES)
        if len(header) < LOCAL_HEADER_BYTES or not header.startswith(ZIP_MAGIC):
            raise PickleRefusedError(f"record {name} isn't where it should be")
        name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
        start = entry.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if start + entry.file_size > self._size_bytes:
            raise PickleRefusedError(f"record {name} goes on behind the end of the file")
        return start, entry.file_size
