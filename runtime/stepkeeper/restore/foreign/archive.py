"""Hold an archive of torch.save that was read whole: check its checksums once, without copying it."""

import io
from typing import final

from isal import isal_zlib
from typing_extensions import override

from stepkeeper_planners.errors import PickleRefusedError
from stepkeeper_planners.pickles.torch_archive import TorchArchive

__all__ = ["HeldArchive"]


@final
class HeldArchive(TorchArchive):
    """An archive in memory. Many threads may check many archives at once: checksums are computed without the GIL."""

    def __init__(self, data: bytes) -> None:
        """Open the archive.

        Raises PickleRefusedError if these bytes are no archive, or none of one tensor or value.
        """
        self.data = data
        super().__init__(io.BytesIO(data), len(data))

    def find_damage(self) -> str | None:
        """Find what is wrong with the archive by the checksums of its records; None if nothing is."""
        for path in sorted(self.names):
            name = path.removeprefix(self.root)
            try:
                held = self.record(name)
            except PickleRefusedError as error:
                return str(error)
            if isal_zlib.crc32(held) != self.entry(name).CRC:
                return f"record {path} has another checksum than it says"
        return None

    @override
    def record(self, name: str) -> memoryview:
        """Return the bytes of a record, which find_damage() checks."""
        start, n_bytes = self.locate_record(name)
        return memoryview(self.data)[start : start + n_bytes]
