"""The objects of a checkpoint: written by each rank, finished by rank 0."""

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
    parted,
)
from stepkeeper.checkpoint.orders import SaveOrder, Structure
from stepkeeper.checkpoint.packing import File, packed
from stepkeeper.checkpoint.reading import manifest_bytes
from stepkeeper.checkpoint.structure_cache import Part, StructureCache, layout_of
from stepkeeper.errors import ManifestError, MissingObjectError, TornCheckpointError, VerifyError
from stepkeeper.log.records import ManifestRef
from stepkeeper.storage.base import Buffer, ObjectStat, Store, StreamedStore, joined_size_bytes
from stepkeeper.storage.crc import block_crcs
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = [
    "FinishedCheckpoint",
    "RankData",
    "files_for",
    "finish_checkpoint",
    "manifest_of",
    "verify_objects",
    "write_checkpoint",
    "write_files",
]

_STREAMS: Final = 8
_DIGESTING: Final = threading.Semaphore(2)
"""Checksums are processors' work, most of it under the GIL: if all objects had theirs made side by side, none would be
on its way to the store meanwhile."""

_LEAST_BYTES: Final = 16 * 1024 * 1024
_LEAST_STREAMED_BYTES: Final = 4 * 1024 * 1024
"""Of an object. Where each upload gets a part of the line only, less time goes by than a request takes by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedCheckpoint:
    """Durable and whole: what a commit entry says of it."""

    folder: str
    manifest: ManifestRef
    size_bytes: int
    objects: tuple[ObjectRecord, ...]
    """Of all ranks, but for the manifest of rank 0."""


def files_for(store: Store, order: SaveOrder) -> tuple[File, ...]:
    """Which objects a rank's share becomes in this store."""
    streams, least_bytes = _streams(store)
    return packed(order, streams=streams, least_bytes=least_bytes)


def write_files(
    store: Store,
    folder: str,
    files: Sequence[File],
    data: RankData,
    *,
    patience: Patience = DEFAULT_PATIENCE,
) -> tuple[ObjectRecord, ...]:
    """They are durable in the folder; as many are written at a time as the store takes. Raises StorageError."""
    with ThreadPoolExecutor(_streams(store)[0], thread_name_prefix="stepkeeper-write") as pool:
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
    """Make one rank's objects durable, and its manifest, but rank 0's: that comes last, by `finish_checkpoint`.

    Raises StorageError.
    """
    streams, least_bytes = _streams(store)
    layout = (layout_of if cache is None else cache.layout)(order, streams=streams, least_bytes=least_bytes)
    objects = write_files(store, order.folder, layout.files, data, patience=patience)
    manifest = manifest_of(order, layout.inventory, objects)
    if order.rank != 0:
        _write_object(store, order.folder, manifest_name(order.rank), [manifest.to_json()], patience)
    return manifest


def manifest_of(order: SaveOrder, inventory: Inventory, objects: Sequence[ObjectRecord]) -> Manifest:
    """Say what the rank wrote, if that is in these objects."""
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
    """Make `.metadata` and rank 0's manifest durable, on rank 0, once all have written. Then it can be committed.

    `others` are what the other ranks' manifests have to be. The `structure` of rank 0's order says which keys lead to
    each name in the nested state; without one, `.metadata` doesn't say it. Raises ManifestError if the ranks' parts
    don't make a whole, TornCheckpointError if a manifest isn't what its rank wrote, StorageError.
    """
    read = [_read_once_shown(store, own.folder, ref, patience) for ref in others]
    shared = sorted((_Shared.of(data, own.folder) for data in read), key=lambda each: each.manifest.rank)
    _check_one_save([own, *(each.manifest for each in shared)])

    def metadata() -> bytes:
        manifests = [own, *(each.whole() for each in shared)]
        key_paths = None if structure is None else json.loads(structure.key_paths)
        paths = None if key_paths is None else {name: tuple(path) for name, path in key_paths.items()}
        return encode_metadata(manifests, key_paths=paths)

    parts = [Part(inventory=own.inventory.digest, aliases=own.aliases), *(each.part for each in shared)]
    if cache is None:
        encoded = metadata()
    else:
        encoded = cache.metadata(None if structure is None else structure.key, parts, metadata)
    written = _write_object(store, own.folder, METADATA_NAME, [encoded], patience)
    complete = replace(own, objects=(*own.objects, written, *(each.record for each in shared)))
    data = complete.to_json()
    record = _write_object(store, own.folder, manifest_name(0), [data], patience)
    objects = (*complete.objects, *(each for part in shared for each in part.manifest.objects))
    return FinishedCheckpoint(
        folder=own.folder,
        manifest=ManifestRef(path=record.path, size_bytes=record.size_bytes, crc32c=record.crc32c),
        size_bytes=record.size_bytes + sum(each.size_bytes for each in objects),
        objects=objects,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    """Another rank's manifest."""

    data: bytes
    manifest: Manifest
    """Without the inventory."""

    part: Part
    where: str

    @classmethod
    def of(cls, data: bytes, folder: str) -> Self:
        heading, inventory = parted(data, folder)
        manifest = Manifest.from_json(heading, folder)
        part = Part(inventory=sha256(inventory).digest(), aliases=manifest.aliases)
        return cls(data=data, manifest=manifest, part=part, where=folder)

    @property
    def record(self) -> ObjectRecord:
        """Of the manifest itself."""
        return _object_record(manifest_name(self.manifest.rank), [self.data])

    def whole(self) -> Manifest:
        """With the inventory."""
        return Manifest.from_json(self.data, self.where)


def verify_objects(
    store: Store, finished: FinishedCheckpoint, *, patience: Patience = DEFAULT_PATIENCE
) -> None:
    """The store holds every object with the size, and where it knows it the checksum, that was written.

    Raises VerifyError naming objects, StorageError.
    """
    folder, ref = finished.folder, finished.manifest
    expected = [(ref.path, ref.size_bytes, ref.crc32c)]
    expected += [(each.path, each.size_bytes, each.crc32c) for each in finished.objects]
    there = _listed_once_shown(store, folder, {path for path, _, _ in expected}, patience)
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


def _read_once_shown(store: Store, folder: str, ref: ManifestRef, patience: Patience) -> bytes:
    """Another rank's manifest. That rank says that it is durable: where it isn't shown yet, it is waited for."""
    for pause_s in patience.pauses_s():
        try:
            return manifest_bytes(store, folder, ref, patience=patience)
        except TornCheckpointError:
            try:
                patience.retry(lambda: store.read(f"{folder}/{ref.path}", 0, 1))
            except MissingObjectError:
                patience.sleep(pause_s)
            else:
                raise
    return manifest_bytes(store, folder, ref, patience=patience)


def _listed_once_shown(
    store: Store, folder: str, expected: Collection[str], patience: Patience
) -> dict[str, ObjectStat]:
    """What the store lists in `folder`, by name, as soon as it lists all that is expected; else what it does."""
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


def _streams(store: Store) -> tuple[int, int]:
    """How many objects are written at a time, and how small they may be for that."""
    if isinstance(store, StreamedStore):
        return store.streams, _LEAST_STREAMED_BYTES
    return _STREAMS, _LEAST_BYTES


def _write_file(store: Store, folder: str, file: File, data: RankData, patience: Patience) -> ObjectRecord:
    with _DIGESTING:
        parts = FileParts(file, data)
        record = _object_record(file.name, parts)
    patience.retry(lambda: store.write(f"{folder}/{file.name}", parts))
    return record


def _write_object(
    store: Store, folder: str, name: str, parts: Sequence[Buffer], patience: Patience
) -> ObjectRecord:
    record = _object_record(name, parts)
    patience.retry(lambda: store.write(f"{folder}/{name}", parts))
    return record


def _object_record(name: str, parts: Sequence[Buffer]) -> ObjectRecord:
    return ObjectRecord(path=name, size_bytes=joined_size_bytes(parts), blocks=block_crcs(parts, BLOCK_BYTES))
