# mypy: disable-error-code="explicit-override"
# typing has override from Python 3.12 on.
"""The files of a committed checkpoint, to be read at any place: whoever reads gets verified bytes, or an error."""

import io
import os
from pathlib import Path
from typing import Any, Final, final
from urllib.parse import unquote, urlsplit

from stepkeeper.checkpoint.reading import CheckpointReader, read_manifests
from stepkeeper.log.entries import CommitRecord
from stepkeeper.manifest import BLOCK_BYTES
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["CommitFiles"]

_KEPT_BLOCKS: Final = 8
"""Beside one for each rank: what lies together in a tensor, ranks have written apart."""


@final
class CommitFiles:
    """Nothing but the manifests is read before it is asked for. Needs memory for a block of each rank, and a few."""

    block_bytes = BLOCK_BYTES

    def __init__(self, store: Store, commit: CommitRecord, *, patience: Patience = DEFAULT_PATIENCE) -> None:
        """Raises TornCheckpointError, ManifestError, StorageError."""
        manifests = read_manifests(store, commit, patience=patience)
        self._reader = CheckpointReader(
            store, manifests, patience=patience, kept_blocks=_KEPT_BLOCKS + len(manifests)
        )
        self._sizes = {record.path: record.size_bytes for each in manifests for record in each.objects}
        self.name = f"{store.uri.rstrip('/')}/{commit.folder}"

    @property
    def path(self) -> Path | None:
        """The folder, where the store is one of this machine."""
        parts = urlsplit(self.name)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None

    def open(self, name: str) -> io.BufferedReader:
        """The file of that name. Raises FileNotFoundError; when it is read, TornCheckpointError and StorageError."""
        if name not in self._sizes:
            raise FileNotFoundError(f"{self.name}: no manifest lists {name!r}")
        return io.BufferedReader(_VerifiedFile(self._reader, name, self._sizes[name]))


@final
class _VerifiedFile(io.RawIOBase):
    def __init__(self, reader: CheckpointReader, name: str, size_bytes: int) -> None:
        self._reader, self._name, self._size_bytes, self._position = reader, name, size_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        into = memoryview(buffer).cast("B")
        n_bytes = max(0, min(len(into), self._size_bytes - self._position))
        into[:n_bytes] = self._reader.read_verified(self._name, self._position, n_bytes)
        self._position += n_bytes
        return n_bytes
