"""Finish a checkpoint on rank 0, and verify what the store holds of it."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Self

from stepkeeper.checkpoint.dcp_format.metadata import METADATA_NAME, encode_metadata
from stepkeeper.checkpoint.layout_cache import LayoutCache, Part
from stepkeeper.checkpoint.manifest import Manifest, ObjectRecord, manifest_name, split_inventory
from stepkeeper.checkpoint.orders import Structure
from stepkeeper.checkpoint.reading import fetch_manifest
from stepkeeper.checkpoint.writing import build_object_record, write_object
from stepkeeper.errors import ManifestError, TornCheckpointError, VerifyError
from stepkeeper.log.records import ManifestRef
from stepkeeper.storage.base import ObjectStat, Store
from stepkeeper.storage.retry import DEFAULT_PATIENCE, Patience

__all__ = ["FinishedCheckpoint", "finish_checkpoint", "verify_objects"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedCheckpoint:
    """A durable and complete checkpoint, as its commit entry describes it."""

    folder: str
    manifest: ManifestRef
    size_bytes: int
    objects: tuple[ObjectRecord, ...]
    """Objects of all ranks, except for the manifest of rank 0."""


def finish_checkpoint(
    store: Store,
    own: Manifest,
    others: Sequence[ManifestRef],
    *,
    structure: Structure | None = None,
    cache: LayoutCache | None = None,
    patience: Patience = DEFAULT_PATIENCE,
) -> FinishedCheckpoint:
    """Write `.metadata` and rank 0's manifest durably. Then the checkpoint can be committed.

    Only rank 0 calls this, after all ranks have written.

    Args:
        store: The store of the checkpoint.
        own: Rank 0's manifest.
        others: References to the other ranks' manifests, which verify them.
        structure: The structure of rank 0's order. It gives `.metadata` the keys that lead to each name in
            the nested state; None leaves them out.
        cache: Keeps the encoded `.metadata` between saves.
        patience: How long to retry requests to the store.

    Raises:
        ManifestError: The ranks' parts form no complete tensors.
        TornCheckpointError: A manifest isn't what its rank wrote.
        StorageError: The store refused, or gave no answer.
    """
    read = [_read_once_visible(store, own.folder, ref, patience) for ref in others]
    others_read = sorted(
        (_OtherManifest.parse(data, own.folder) for data in read), key=lambda each: each.manifest.rank
    )
    _check_one_save([own, *(each.manifest for each in others_read)])

    def encode() -> bytes:
        manifests = [own, *(Manifest.from_json(each.data, own.folder) for each in others_read)]
        key_paths = None if structure is None else json.loads(structure.key_paths)
        paths = None if key_paths is None else {name: tuple(path) for name, path in key_paths.items()}
        return encode_metadata(manifests, key_paths=paths)

    parts = [Part(inventory=own.inventory.digest, aliases=own.aliases), *(each.part for each in others_read)]
    if cache is None:
        encoded = encode()
    else:
        encoded = cache.get_metadata(None if structure is None else structure.key, parts, encode)
    written = write_object(store, own.folder, METADATA_NAME, [encoded], patience)
    complete = replace(own, objects=(*own.objects, written, *(each.record for each in others_read)))
    data = complete.to_json()
    record = write_object(store, own.folder, manifest_name(0), [data], patience)
    objects = (*complete.objects, *(each for part in others_read for each in part.manifest.objects))
    return FinishedCheckpoint(
        folder=own.folder,
        manifest=record.make_ref(),
        size_bytes=record.size_bytes + sum(each.size_bytes for each in objects),
        objects=objects,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OtherManifest:
    """Another rank's manifest. Its inventory may be very long, and is decoded only if the cache has no `.metadata`."""

    data: bytes
    manifest: Manifest
    """The manifest without its inventory."""

    part: Part

    @classmethod
    def parse(cls, data: bytes, folder: str) -> Self:
        heading, inventory = split_inventory(data, folder)
        manifest = Manifest.from_json(heading, folder)
        part = Part(inventory=sha256(inventory).digest(), aliases=manifest.aliases)
        return cls(data=data, manifest=manifest, part=part)

    @property
    def record(self) -> ObjectRecord:
        """The record of the manifest itself."""
        return build_object_record(manifest_name(self.manifest.rank), [self.data])


def verify_objects(
    store: Store, finished: FinishedCheckpoint, *, patience: Patience = DEFAULT_PATIENCE
) -> None:
    """Check that the store holds every object as it was written, by size and, if known, by checksum.

    Raises VerifyError, which names objects that are missing or differ, and StorageError.
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
        except TornCheckpointError as error:
            if not error.missing:
                raise
            patience.sleep(pause_s)
    return fetch_manifest(store, folder, ref, patience=patience)


def _list_once_visible(
    store: Store, folder: str, expected: Collection[str], patience: Patience
) -> dict[str, ObjectStat]:
    """List `folder` by name, once the store lists all expected objects, or when patience runs out."""
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
