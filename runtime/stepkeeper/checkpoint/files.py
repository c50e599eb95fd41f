# mypy: disable-error-code="explicit-override"
# typing has override from Python 3.12 on.
"""Read the files of a committed checkpoint at any offset. Every read returns verified bytes, or raises an error."""

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, final
from urllib.parse import unquote, urlsplit

from stepkeeper.checkpoint.manifest import BLOCK_BYTES
from stepkeeper.checkpoint.reading import BlockReader, read_manifests, slice_blocks
from stepkeeper.log.records import CommitRecord
from stepkeeper.storage.base import Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["CommitFiles"]

_KEPT_BLOCKS: Final = 8
"""Blocks to keep besides those for each rank that saved."""

_AHEAD_BLOCKS: Final = 4
"""Blocks to fetch ahead, divided among the objects that are read in parallel; none if there are more objects."""


@final
class CommitFiles:
    """Open the files of a commit, and fetch ahead the blocks that follow a read.

    Only the manifests are read at first. Adjacent parts of a tensor are in the files of different ranks, so this
    keeps one block for each rank that saved, and a few more.
    """

    block_bytes = BLOCK_BYTES

    def __init__(self, store: Store, commit: CommitRecord, *, patience: Patience = DEFAULT_PATIENCE) -> None:
        """Read the commit's manifests. Raises TornCheckpointError, ManifestError and StorageError."""
        manifests = read_manifests(store, commit, patience=patience)
        self._n_ahead = _AHEAD_BLOCKS // len(manifests)
        self._n_kept = _KEPT_BLOCKS + len(manifests) * (1 + self._n_ahead)
        self._reader = BlockReader(store, manifests, patience=patience)
        self._sizes = {record.path: record.size_bytes for each in manifests for record in each.objects}
        self._elements = {
            (chunk.path, chunk.offset_bytes): chunk.offset_bytes + chunk.data_offset_bytes
            for each in manifests
            for tensor in each.tensors
            for chunk in tensor.chunks
        }
        self._last: dict[str, int] = {}
        """The number of the last block that was read, by object."""
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, int], Future[bytes]] = OrderedDict()
        """The last blocks that were read or fetched ahead, the newest last."""
        self._pool = ThreadPoolExecutor(_AHEAD_BLOCKS, thread_name_prefix="stepkeeper-fetch")
        self.name = f"{store.uri.rstrip('/')}/{commit.folder}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def path(self) -> Path | None:
        """The folder, if the store is on this machine."""
        parts = urlsplit(self.name)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None

    def elements_at(self, name: str, offset_bytes: int) -> int | None:
        """Return the offset of the elements of the chunk whose tensor file is at `offset_bytes`, if any."""
        return self._elements.get((name, offset_bytes))

    def open(self, name: str) -> io.BufferedReader:
        """Open the file of that name, for verified reading. Raises FileNotFoundError."""
        if name not in self._sizes:
            raise FileNotFoundError(f"{self.name}: no manifest lists {name!r}")
        return io.BufferedReader(_VerifiedFile(self._read, name, self._sizes[name]))

    def _read(self, name: str, offset: int, length: int) -> bytes:
        return slice_blocks(offset, length, partial(self._read_blocks, name))

    def _read_blocks(self, name: str, wanted: range) -> list[bytes]:
        # Only a reader that goes through an object block by block will need the following blocks. The first read of an
        # object counts as such if it is of one block.
        last = self._last.get(name, wanted[-1])
        is_sequential = wanted[0] in (last, last + 1)
        n_blocks = -(-self._sizes[name] // BLOCK_BYTES)
        end = min(wanted.stop + self._n_ahead, n_blocks) if is_sequential else wanted.stop
        self._last[name] = wanted[-1]
        with self._lock:
            fetching = [self._fetch(name, block) for block in range(wanted.start, end)]
            while len(self._blocks) > self._n_kept:
                self._blocks.popitem(last=False)
        try:
            return [each.result() for each in fetching[: len(wanted)]]
        except BaseException:
            with self._lock:
                # The next read of them tries again.
                for block in wanted:
                    self._blocks.pop((name, block), None)
            raise

    def _fetch(self, name: str, block: int) -> Future[bytes]:
        """Return the future of the block; another thread starts to read it if none has."""
        if (name, block) not in self._blocks:
            self._blocks[name, block] = self._pool.submit(self._reader.read_block, name, block)
        self._blocks.move_to_end((name, block))
        return self._blocks[name, block]


@final
class _VerifiedFile(io.RawIOBase):
    def __init__(self, read: Callable[[str, int, int], bytes], name: str, size_bytes: int) -> None:
        self._read, self._name, self._size_bytes, self._position = read, name, size_bytes, 0

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
        if n_bytes:
            into[:n_bytes] = self._read(self._name, self._position, n_bytes)
        self._position += n_bytes
        return n_bytes
