"""The objects of a checkpoint: written by each rank, finished by rank 0, read back verified."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final, final

from stepkeeper.dcp.blob import blob_layout, encode_blob
from stepkeeper.dcp.dtypes import size_in_bytes
from stepkeeper.dcp.metadata import METADATA_NAME, KeyPath, encode_metadata
from stepkeeper.errors import (
    ManifestError,
    MissingObjectError,
    TornCheckpointError,
    TransientStorageError,
    VerifyError,
)
from stepkeeper.log.entries import CommitRecord, ManifestRef
from stepkeeper.manifest import (
    BLOCK_BYTES,
    ChunkRecord,
    Manifest,
    ObjectRecord,
    TensorRecord,
    ValueRecord,
    checkpoint_folder,
    manifest_name,
)
from stepkeeper.storage.base import Buffer, Store, joined_size_bytes
from stepkeeper.storage.crc import block_crcs, crc32c
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = [
    "CheckpointReader",
    "FinishedCheckpoint",
    "SaveOrder",
    "TensorOrder",
    "ValueOrder",
    "finish_checkpoint",
    "read_manifests",
    "verify_objects",
    "write_checkpoint",
]

_THREADS: Final = 8
_LEAST_FILE_BYTES: Final = 16 * 1024 * 1024
_MOST_FILE_BYTES: Final = 512 * 1024 * 1024
_FRESH_READS: Final = 2
"""Reads after a bad one before bytes are called bad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorOrder:
    """A box of a tensor to write: row-major elements from `start` on in the rank's data."""

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOrder:
    fqn: str
    start: int
    length_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """What one rank writes of one save."""

    rank: int
    world_size: int
    step: int
    claim: int
    """The claim's slot."""

    nonce: str
    """The save's own: `new_nonce()`, the same on all ranks."""

    tensors: tuple[TensorOrder, ...]
    values: tuple[ValueOrder, ...]

    @property
    def folder(self) -> str:
        return checkpoint_folder(self.step, self.claim, self.nonce)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedCheckpoint:
    """Durable and whole: what a commit entry says of it."""

    manifest: ManifestRef
    size_bytes: int
    manifests: tuple[Manifest, ...]
    """By rank."""


def write_checkpoint(
    store: Store, order: SaveOrder, data: memoryview, *, patience: Patience = DEFAULT_PATIENCE
) -> Manifest:
    """One rank's objects are durable, and so is its manifest, but rank 0's: that comes last, by `finish_checkpoint`.

    Raises StorageError.
    """
    raise NotImplementedError


def finish_checkpoint(
    store: Store,
    own: Manifest,
    others: Sequence[ManifestRef],
    *,
    aliases: Mapping[str, str] | None = None,
    key_paths: Mapping[str, KeyPath] | None = None,
    patience: Patience = DEFAULT_PATIENCE,
) -> FinishedCheckpoint:
    """On rank 0, once all have written: `.metadata` and rank 0's manifest are durable. Ready to be committed."""
    raise NotImplementedError


def verify_objects(
    store: Store, finished: FinishedCheckpoint, *, patience: Patience = DEFAULT_PATIENCE
) -> None:
    """The store holds every object with the size, and where it knows it the checksum, that was written.

    Raises VerifyError.
    """
    raise NotImplementedError


def read_manifests(
    store: Store, commit: CommitRecord, *, patience: Patience = DEFAULT_PATIENCE
) -> tuple[Manifest, ...]:
    """All ranks' manifests, by rank, proven by the commit entry. Raises TornCheckpointError, StorageError."""
    raise NotImplementedError


@final
class CheckpointReader:
    """Reads the objects of one checkpoint; many threads at once."""

    def __init__(
        self, store: Store, manifests: Sequence[Manifest], *, patience: Patience = DEFAULT_PATIENCE
    ) -> None:
        raise NotImplementedError

    def read_verified(self, path: str, offset: int, length: int) -> bytes:
        """These bytes of the object, every block that holds one of them verified.

        Raises TornCheckpointError naming object and block when they were read bad three times; StorageError.
        """
        raise NotImplementedError
