"""Hold an archive of torch.save that was read whole: check its checksums once, without copying it."""

import io
import zipfile
import zlib
from typing import Final, final

import torch
from isal import isal_zlib
from typing_extensions import override

from stepkeeper_planners.errors import PickleRefusedError
from stepkeeper_planners.pickles.torch_archive import LOCAL_HEADER_BYTES, SeekableArchive

__all__ = ["HeldArchive", "find_broken_record"]

_BROKEN_ZIP: Final = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    ValueError,
    LookupError,
    OSError,
    RuntimeError,
)


@final
class HeldArchive(SeekableArchive):
    """An archive in memory. Many threads may check many archives at once: checksums are computed without the GIL."""

    def __init__(self, data: bytes) -> None:
        """Open the archive.

        Raises PickleRefusedError if these bytes are no archive, or none of one tensor or value.
        """
        self._data = memoryview(data)
        super().__init__(io.BytesIO(data), len(data))

    def find_damage(self) -> str | None:
        """Find what is wrong with the archive by the checksums of its records; None if nothing is."""
        for path in sorted(self.names):
            name = path.removeprefix(self.root)
            try:
                start, n_bytes = self.locate_record(name)
            except PickleRefusedError as error:
                return str(error)
            entry, known = self.entry(name), path.encode()
            named_at = entry.header_offset + LOCAL_HEADER_BYTES
            if self._data[named_at : named_at + len(known)] != known:
                return f"record {path} has another name where it stands"
            if isal_zlib.crc32(self._data[start : start + n_bytes]) != entry.CRC:
                return f"record {path} has another checksum than it says"
        return None

    @override
    def record(self, name: str) -> bytes:
        # The bytes that find_damage() has checked. Newer Pythons' zipfile refuses an entry for other fields of it, too.
        return bytes(self._held(name))

    def _held(self, name: str) -> memoryview:
        start, n_bytes = self.locate_record(name)
        return self._data[start : start + n_bytes]

    @override
    def content(self, name: str) -> torch.Tensor:
        held = self._held(name)
        # A copy, because a tensor's memory may be written to.
        return (
            torch.frombuffer(bytearray(held), dtype=torch.uint8)
            if held
            else torch.empty(0, dtype=torch.uint8)
        )


def find_broken_record(archive_bytes: bytes) -> str | None:
    """Find what is wrong with an archive of torch.save by the checksums of its records; None if nothing is."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive_bytes)) as archive:
            bad = archive.testzip()
    except _BROKEN_ZIP as error:
        return f"it is no archive ({error})"
    return None if bad is None else f"record {bad} has another checksum than it says"
