"""Read a checkpoint back, and verify every block against its manifest."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, final

from stepkeeper.checkpoint.dcp_format.metadata import METADATA_NAME
from stepkeeper.checkpoint.manifest import BLOCK_BYTES, Manifest, manifest_name, split_inventory
from stepkeeper.checkpoint.reread import read_if_present, read_until_good
from stepkeeper.errors import BadBytes, ManifestError, StorageError, TornCheckpointError
from stepkeeper.log.records import CommitRecord, ManifestRef
from stepkeeper.storage.base import PiecewiseStore, Store
from stepkeeper.storage.crc import block_crcs, crc32c, crc32c_at_once
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = [
    "BlockReader",
    "check_metadata",
    "fetch_manifest",
    "list_other_refs",
    "prove_manifests",
    "read_manifest",
    "read_manifest_bytes",
    "read_manifests",
    "slice_blocks",
]

_PIECE_BYTES: Final = 1024 * 1024
"""The bytes of a block that are read, put in place and added to its checksum at once."""

_THREADS: Final = 16
"""Threads that read manifests: there is one manifest for each rank that saved."""


def read_manifests(
    store: Store, commit: CommitRecord, *, patience: Patience = DEFAULT_PATIENCE
) -> tuple[Manifest, ...]:
    """Read all ranks' manifests, by rank, and prove them by the commit's entry.

    Raises TornCheckpointError if one isn't what its rank wrote, and StorageError.
    """
    return prove_manifests(read_manifest_bytes(store, commit, patience=patience), commit, store.uri)


def read_manifest_bytes(
    store: Store, commit: CommitRecord, *, patience: Patience = DEFAULT_PATIENCE
) -> tuple[bytes, ...]:
    """Read all ranks' manifests, by rank, as they are stored. Raises TornCheckpointError, StorageError."""
    read = partial(fetch_manifest, store, commit.folder, patience=patience)
    first = read(commit.manifest)
    refs = list(list_other_refs(_decode_head(first, commit, store.uri), f"{store.uri}/{commit.folder}"))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="stepkeeper-manifests") as threads:
        return (first, *threads.map(read, refs))


def prove_manifests(stored: Sequence[bytes], commit: CommitRecord, uri: str) -> tuple[Manifest, ...]:
    """Decode these manifests, by rank, and prove them by the commit's entry. Raises TornCheckpointError."""
    where = f"{uri}/{commit.folder}"
    first, *others = stored
    manifests = [_prove_manifest(first, commit.folder, commit.manifest, where)]
    refs = list(list_other_refs(manifests[0], where))
    if len(refs) != len(others):
        raise ManifestError(f"{where}: {len(stored)} manifests, but rank 0's lists {1 + len(refs)}")
    manifests += [
        _prove_manifest(data, commit.folder, ref, where) for data, ref in zip(others, refs, strict=True)
    ]
    return tuple(manifests)


def read_manifest(
    store: Store, folder: str, ref: ManifestRef, *, patience: Patience = DEFAULT_PATIENCE
) -> Manifest:
    """Read the manifest that `ref` names. Raises TornCheckpointError, StorageError."""
    data = fetch_manifest(store, folder, ref, patience=patience)
    return Manifest.from_json(data, f"{store.uri}/{folder}/{ref.path}")


def check_metadata(store: Store, commit: CommitRecord) -> None:
    """Check `.metadata`, which stock readers use. Raises TornCheckpointError and StorageError."""
    data = fetch_manifest(store, commit.folder, commit.manifest, patience=DEFAULT_PATIENCE)
    first = _decode_head(data, commit, store.uri)
    for record in first.objects:
        if record.path == METADATA_NAME:
            BlockReader(store, (first,)).read_verified(METADATA_NAME, 0, record.size_bytes)


def list_other_refs(first: Manifest, where: str) -> Iterator[ManifestRef]:
    """Yield references to the other ranks' manifests, from rank 0's."""
    listed = {record.path: record for record in first.objects}
    for rank in range(1, first.world_size):
        record = listed.get(manifest_name(rank))
        if record is None:
            raise ManifestError(f"{where}: rank 0's manifest doesn't list rank {rank}'s")
        yield record.make_ref()


def fetch_manifest(store: Store, folder: str, ref: ManifestRef, *, patience: Patience) -> bytes:
    """Read the manifest that `ref` names, as it is stored. Raises TornCheckpointError, StorageError."""
    path = f"{folder}/{ref.path}"
    whole = _refer_to_whole(folder, ref)

    def bad(data: bytes) -> tuple[str, BadBytes] | None:
        fault = _find_difference(data, ref)
        return None if fault is None else (fault, whole)

    return read_until_good(
        store, path, lambda: read_if_present(store, path), bad, missing=whole, patience=patience
    )


def _decode_head(data: bytes, commit: CommitRecord, uri: str) -> Manifest:
    """Decode rank 0's manifest without its inventory, which may be very long. Raises ManifestError."""
    where = f"{uri}/{commit.folder}/{commit.manifest.path}"
    with suppress(ManifestError):  # `from_json` reports what is wrong
        data = split_inventory(data, where)[0]
    return Manifest.from_json(data, where)


def _prove_manifest(data: bytes, folder: str, ref: ManifestRef, where: str) -> Manifest:
    fault = _find_difference(data, ref)
    if fault is not None:
        raise TornCheckpointError(
            f"{where}/{ref.path} is not what was written: {fault}", _refer_to_whole(folder, ref)
        )
    return Manifest.from_json(data, f"{where}/{ref.path}")


def _find_difference(data: bytes, ref: ManifestRef) -> str | None:
    """Describe these bytes if they differ from those that `ref` names; else return None."""
    same = len(data) == ref.size_bytes and crc32c(data) == ref.crc32c
    return None if same else f"{len(data)} bytes, crc32c {crc32c(data):08x}"


def _refer_to_whole(folder: str, ref: ManifestRef) -> BadBytes:
    return BadBytes(path=f"{folder}/{ref.path}", length_bytes=ref.size_bytes, crc32c=ref.crc32c)


@final
class BlockReader:
    """Read blocks of one checkpoint's objects and verify each, in many threads at once."""

    def __init__(
        self,
        store: Store,
        manifests: Sequence[Manifest],
        *,
        patience: Patience = DEFAULT_PATIENCE,
        folder: str | None = None,
    ) -> None:
        """Prepare to read by all ranks' proven manifests, from `folder`, or from their own if that is None."""
        self._store = store
        self._patience = patience
        self._folder = manifests[0].folder if folder is None else folder
        self._objects = {record.path: record for m in manifests for record in m.objects}

    def read_verified(self, path: str, offset: int, length: int) -> bytes:
        """Read these bytes of the object, and verify every block that holds one of them.

        Raises TornCheckpointError, which names a block that was bad in three reads, and StorageError.
        """
        return slice_blocks(offset, length, partial(map, partial(self.read_block, path)))

    def stream_block(self, path: str, block: int, put: Callable[[int, bytes], None]) -> bool:
        """Call `put` with the block's bytes, piece by piece, and the place of each in the block.

        A piece that is used at once is still in the processor's cache. Return whether the bytes were right, which is
        known only at the end. If not, or if the store can't do this, they have to be read with `read_block`.
        """
        store, record, start = self._store, self._objects[path], block * BLOCK_BYTES
        if not isinstance(store, PiecewiseStore):
            return False
        length, crc, first = min(BLOCK_BYTES, record.size_bytes - start), 0, 0
        # `read_block` reports what is wrong.
        with suppress(StorageError):
            for piece in store.read_pieces(f"{self._folder}/{path}", start, length, _PIECE_BYTES):
                put(first, piece)
                crc, first = crc32c_at_once(piece, crc), first + len(piece)
        return (crc, first) == (record.blocks[block], length)

    def read_block(self, path: str, block: int) -> bytes:
        """Read the whole block, verified. Raises as `read_verified`."""
        record, start = self._objects[path], block * BLOCK_BYTES
        # Also what an error names, if they are bad.
        wanted = BadBytes(
            path=f"{self._folder}/{path}",
            offset_bytes=start,
            length_bytes=min(BLOCK_BYTES, record.size_bytes - start),
            crc32c=record.blocks[block],
            block=block,
        )

        def bad(data: bytes) -> tuple[str, BadBytes] | None:
            if block_crcs([data], BLOCK_BYTES) == (record.blocks[block],):
                return None
            return f"block {block} of {len(record.blocks)}", wanted

        def read() -> bytes | None:
            return read_if_present(self._store, wanted.path, wanted.offset_bytes, wanted.length_bytes)

        return read_until_good(self._store, wanted.path, read, bad, missing=wanted, patience=self._patience)


def slice_blocks(offset: int, length: int, read: Callable[[range], Iterable[bytes]]) -> bytes:
    """Return these bytes of an object, from the blocks that `read` returns for their numbers."""
    if not length:
        return b""
    wanted = range(offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES + 1)
    skipped = offset - wanted.start * BLOCK_BYTES
    blocks = list(read(wanted))
    if len(blocks) == 1:
        return blocks[0][skipped : skipped + length]
    last = length + skipped - BLOCK_BYTES * (len(blocks) - 1)
    return b"".join([memoryview(blocks[0])[skipped:], *blocks[1:-1], memoryview(blocks[-1])[:last]])
