"""Write the objects of a checkpoint on each rank, and finish them on rank 0."""

import json
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final, Self

from stepkeeper.checkpoint.dcp_format.metadata import METADATA_NAME, encode_metadata
from stepkeeper.checkpoint.file_parts import FileParts, RankData
from stepkeeper.checkpoint.manifest import (
    BLOCK_BYTES,
    Inventory,
    Manifest,
    ObjectRecord,
    manifest_name,
    split_inventory,
)
from stepkeeper.checkpoint.orders import SaveOrder, Structure
from stepkeeper.checkpoint.packing import File, pack_order
from stepkeeper.checkpoint.reading import fetch_manifest
from stepkeeper.checkpoint.structure_cache import Part, StructureCache, lay_out
from stepkeeper.errors import ManifestError, MissingObjectError, TornCheckpointError, VerifyError
from stepkeeper.log.records import ManifestRef
from stepkeeper.storage.base import Buffer, ObjectStat, Store, StreamedStore, joined_size_bytes
from stepkeeper.storage.crc import block_crcs
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = [
    "FinishedCheckpoint",
    "RankData",
    "build_manifest",
    "finish_checkpoint",
    "plan_files",
    "verify_objects",
    "write_checkpoint",
    "write_files",
]

_STREAMS: Final = 8
_DIGESTING: Final = threading.Semaphore(2)
"""Checksums need the processor, most of it under the GIL. If all objects were digested at the same time, none would
be on its way to the store meanwhile.
"""

_LEAST_BYTES: Final = 16 * 1024 * 1024
_LEAST_STREAMED_BYTES: Final = 4 * 1024 * 1024
"""Least size of an object where each upload gets only a part of the line: uploading less takes no longer than a
request takes anyway.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedCheckpoint:
    """A durable and complete checkpoint, as its commit entry describes it."""

    folder: str
    manifest: ManifestRef
    size_bytes: int
    objects: tuple[ObjectRecord, ...]
    """Objects of all ranks, except for the manifest of rank 0."""


def plan_files(store: Store, order: SaveOrder) -> tuple[File, ...]:
    """Plan the objects that a rank's share becomes in this store."""
    streams, least_bytes = _choose_streams(store)
    return pack_order(order, streams=streams, least_bytes=least_bytes)


def write_files(
    store: Store,
    folder: str,
    files: Sequence[File],
    data: RankData,
    *,
    patience: Patience = DEFAULT_PATIENCE,
) -> tuple[ObjectRecord, ...]:
    """Write the files into the folder durably, as many at a time as the store takes. Raises StorageError."""
    with ThreadPoolExecutor(_choose_streams(store)[0], thread_name_prefix="stepkeeper-write") as pool:
        writes = [pool.submit(_write_file, store, folder, file, data, patience) for file in files]
        try:
            return tuple(write.result() for write in writes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def write_checkpoint(
    store: Store,
    order: SaveOrder,
    data: RankData,
    *,
    cache: StructureCache | None = None,
    patience: Patience = DEFAULT_PATIENCE,
) -> Manifest:
    """Make one rank's objects durable, and its manifest. Rank 0's manifest comes last, with `finish_checkpoint`.

    Raises:
        StorageError: The store refused, or gave no answer.

    """
    streams, least_bytes = _choose_streams(store)
    layout = (lay_out if cache is None else cache.get_layout)(order, streams=streams, least_bytes=least_bytes)
    objects = write_files(store, order.folder, layout.files, data, patience=patience)
    manifest = build_manifest(order, layout.inventory, objects)
    if order.rank != 0:
        _write_object(store, order.folder, manifest_name(order.rank), [manifest.to_json()], patience)
    return manifest


def build_manifest(order: SaveOrder, inventory: Inventory, objects: Sequence[ObjectRecord]) -> Manifest:
    """Build the manifest of a rank that wrote these objects."""
    return Manifest(
        rank=order.rank,
        world_size=order.world_size,
        step=order.step,
        claim=order.claim,
        nonce=order.nonce,
        objects=tuple(objects),
        inventory=inventory,
        aliases=dict(order.structure.aliases),
    )


def finish_checkpoint(
    store: Store,
    own: Manifest,
    others: Sequence[ManifestRef],
    *,
    structure: Structure | None = None,
    cache: StructureCache | None = None,
    patience: Patience = DEFAULT_PATIENCE,
) -> FinishedCheckpoint:
    """Make `.metadata` and rank 0's manifest durable. Then the checkpoint can be committed.

    Ranks: only rank 0 calls this, after all ranks have written.

    Args:
        store: The store of the checkpoint.
        own: Rank 0's manifest.
        others: References to the other ranks' manifests, by which these are proven.
        structure: The structure of rank 0's order. It gives `.metadata` the keys that lead to each name in the
            nested state; None leaves them out.
        cache: Keeps the encoded `.metadata` from save to save.
        patience: How long to retry requests to the store.

    Raises:
        ManifestError: The ranks' parts don't make a whole.
        TornCheckpointError: A manifest isn't what its rank wrote.
        StorageError: The store refused, or gave no answer.

    """
    read = [_read_once_visible(store, own.folder, ref, patience) for ref in others]
    others_read = sorted(
        (_OtherManifest.parse(data, own.folder) for data in read), key=lambda each: each.manifest.rank
    )
    _check_one_save([own, *(each.manifest for each in others_read)])

    def metadata() -> bytes:
        manifests = [own, *(each.parse_whole() for each in others_read)]
        key_paths = None if structure is None else json.loads(structure.key_paths)
        paths = None if key_paths is None else {name: tuple(path) for name, path in key_paths.items()}
        return encode_metadata(manifests, key_paths=paths)

    parts = [Part(inventory=own.inventory.digest, aliases=own.aliases), *(each.part for each in others_read)]
    if cache is None:
        encoded = metadata()
    else:
        encoded = cache.get_metadata(None if structure is None else structure.key, parts, metadata)
    written = _write_object(store, own.folder, METADATA_NAME, [encoded], patience)
    complete = replace(own, objects=(*own.objects, written, *(each.record for each in others_read)))
    data = complete.to_json()
    record = _write_object(store, own.folder, manifest_name(0), [data], patience)
    objects = (*complete.objects, *(each for part in others_read for each in part.manifest.objects))
    return FinishedCheckpoint(
        folder=own.folder,
        manifest=ManifestRef(path=record.path, size_bytes=record.size_bytes, crc32c=record.crc32c),
        size_bytes=record.size_bytes + sum(each.size_bytes for each in objects),
        objects=objects,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OtherManifest:
    """Another rank's manifest, as this rank reads it."""

    data: bytes
    manifest: Manifest
    """The manifest without its inventory."""

    part: Part
    where: str

    @classmethod
    def parse(cls, data: bytes, folder: str) -> Self:
        heading, inventory = split_inventory(data, folder)
        manifest = Manifest.from_json(heading, folder)
        part = Part(inventory=sha256(inventory).digest(), aliases=manifest.aliases)
        return cls(data=data, manifest=manifest, part=part, where=folder)

    @property
    def record(self) -> ObjectRecord:
        """The record of the manifest itself."""
        return _build_object_record(manifest_name(self.manifest.rank), [self.data])

    def parse_whole(self) -> Manifest:
        """Decode the manifest with its inventory."""
        return Manifest.from_json(self.data, self.where)


def verify_objects(
    store: Store, finished: FinishedCheckpoint, *, patience: Patience = DEFAULT_PATIENCE
) -> None:
    """Check that the store holds every object with the written size and, if it knows the checksum, the written
    checksum.

    Raises:
        VerifyError: It doesn't; the error names objects.
        StorageError: The store gave no answer.

    """
    folder, ref = finished.folder, finished.manifest
    expected = [(ref.path, ref.size_bytes, ref.crc32c)]
    expected += [(each.path, each.size_bytes, each.crc32c) for each in finished.objects]
    there = _list_once_visible(store, folder, {path for path, _, _ in expected}, patience)
    wrong = []
    for path, size_bytes, crc in expected:
        stat = there.get(path)
        if stat is None:
            wrong.append(f"{path} is missing")
        elif stat.size_bytes != size_bytes:
            wrong.append(f"{path} has {stat.size_bytes} bytes instead of {size_bytes}")
        elif stat.crc32c not in (None, crc):
            wrong.append(f"{path} has crc32c {stat.crc32c:08x} instead of {crc:08x}")
    if wrong:
        raise VerifyError(
            f"{store.uri}/{folder}: {len(wrong)} of {len(expected)} objects: {'; '.join(wrong[:4])}"
        )


def _read_once_visible(store: Store, folder: str, ref: ManifestRef, patience: Patience) -> bytes:
    """Read another rank's manifest. That rank has made it durable, so wait if the store doesn't show it yet."""
    for pause_s in patience.pauses_s():
        try:
            return fetch_manifest(store, folder, ref, patience=patience)
        except TornCheckpointError:
            try:
                patience.retry(lambda: store.read(f"{folder}/{ref.path}", 0, 1))
            except MissingObjectError:
                patience.sleep(pause_s)
            else:
                raise
    return fetch_manifest(store, folder, ref, patience=patience)


def _list_once_visible(
    store: Store, folder: str, expected: Collection[str], patience: Patience
) -> dict[str, ObjectStat]:
    """List `folder` by name, once the store lists all that is expected, or when the patience is over."""
    pauses_s = patience.pauses_s()
    while True:
        listed = patience.retry(lambda: store.list(f"{folder}/"))
        there = {stat.path.removeprefix(f"{folder}/"): stat for stat in listed}
        pause_s = None if there.keys() >= set(expected) else next(pauses_s, None)
        if pause_s is None:
            return there
        patience.sleep(pause_s)


def _check_one_save(manifests: Sequence[Manifest]) -> None:
    own = manifests[0]
    saves = {(m.step, m.claim, m.nonce, m.world_size) for m in manifests}
    if len(saves) > 1 or [m.rank for m in manifests] != list(range(own.world_size)):
        raise ManifestError(
            f"{own.folder} has manifests of ranks {[m.rank for m in manifests]} of {own.world_size}, "
            f"of {len(saves)} different saves"
        )


def _choose_streams(store: Store) -> tuple[int, int]:
    """Return how many objects to write at a time, and the least size of each."""
    if isinstance(store, StreamedStore):
        return store.streams, _LEAST_STREAMED_BYTES
    return _STREAMS, _LEAST_BYTES


def _write_file(store: Store, folder: str, file: File, data: RankData, patience: Patience) -> ObjectRecord:
    with _DIGESTING:
        parts = FileParts(file, data)
        record = _build_object_record(file.name, parts)
    patience.retry(lambda: store.write(f"{folder}/{file.name}", parts))
    return record


def _write_object(
    store: Store, folder: str, name: str, parts: Sequence[Buffer], patience: Patience
) -> ObjectRecord:
    record = _build_object_record(name, parts)
    patience.retry(lambda: store.write(f"{folder}/{name}", parts))
    return record


def _build_object_record(name: str, parts: Sequence[Buffer]) -> ObjectRecord:
    return ObjectRecord(path=name, size_bytes=joined_size_bytes(parts), blocks=block_crcs(parts, BLOCK_BYTES))
