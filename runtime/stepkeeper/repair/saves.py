"""Find the saves in a root that no entry of its log tells of."""

import re
from collections.abc import Collection, Mapping
from typing import Final

from stepkeeper.checkpoint import read_manifests
from stepkeeper.checkpoint.manifest import Manifest, manifest_name
from stepkeeper.errors import ManifestError, MissingObjectError, TornCheckpointError, TransientStorageError
from stepkeeper.log import CommitRecord, ManifestRef
from stepkeeper.log.reading import read_afresh
from stepkeeper.repair.evidence import FoundSave
from stepkeeper.storage import ObjectStat, Store
from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.retry import Patience

__all__ = ["find_saves", "sizes_by_folder"]

_OBJECT: Final = re.compile(r"((?:0|[1-9][0-9]*)/(?:0|[1-9][0-9]*)-[0-9a-f]{32})/([^/]+)")


def sizes_by_folder(listed: Collection[ObjectStat]) -> dict[str, dict[str, int]]:
    """Return the sizes of the objects of each save's folder, by their names in it. Pure."""
    found: dict[str, dict[str, int]] = {}
    for stat in listed:
        match = _OBJECT.fullmatch(stat.path)
        if match is not None:
            found.setdefault(match[1], {})[match[2]] = stat.size_bytes
    return found


def find_saves(
    store: Store,
    folders: Mapping[str, Mapping[str, int]],
    *,
    named: Collection[str],
    since: int,
    patience: Patience,
) -> tuple[FoundSave, ...]:
    """Find the saves of the claims from `since` on that had come to their end and that no entry tells of.

    A save that has come to its end has rank 0's manifest, which is written last. Tensor files aren't read.

    Args:
        store: The root's store.
        folders: The objects of each folder.
        named: The folders that entries tell of.
        since: The first claim to look at.
        patience: How long to retry while the store doesn't answer.

    Raises:
        StorageError: The store gave no answer, or refused.

    """
    first = manifest_name(0)
    return tuple(
        _look_at(store, folder, sizes, patience)
        for folder, sizes in sorted(folders.items())
        if first in sizes and folder not in named and _claim_of(folder) >= since
    )


def _claim_of(folder: str) -> int:
    return int(folder.partition("/")[2].partition("-")[0])


def _look_at(store: Store, folder: str, sizes: Mapping[str, int], patience: Patience) -> FoundSave:
    path = manifest_name(0)
    data = patience.retry(lambda: _read_alike(store, f"{folder}/{path}"))
    ref = ManifestRef(path=path, size_bytes=len(data), crc32c=crc32c(data))
    # The commit's own record isn't known: this one names the manifest as it is there now.
    record = CommitRecord(
        slot=0,
        claim=_claim_of(folder),
        step=int(folder.partition("/")[0]),
        folder=folder,
        size_bytes=0,
        manifest=ref,
    )
    fault, size_bytes = None, sum(sizes.values())
    try:
        manifests = read_manifests(store, record, patience=patience)
        size_bytes = len(data) + manifests[0].size_bytes + sum(m.size_bytes for m in manifests[1:])
        fault = _find_fault(manifests, folder, sizes)
    except (TornCheckpointError, ManifestError) as error:
        fault = str(error)
    return FoundSave(
        folder=folder, step=record.step, claim=record.claim, size_bytes=size_bytes, manifest=ref, fault=fault
    )


def _read_alike(store: Store, path: str) -> bytes:
    """Read an object twice, over a fresh connection the second time: no checksum is known to compare it with.

    Raises TransientStorageError if the two readings differ.
    """
    try:
        first, second = store.read(path), read_afresh(store, path)
    except MissingObjectError as error:
        raise TransientStorageError(f"{store.uri}/{path} is listed, but isn't found") from error
    if first != second:
        raise TransientStorageError(f"{store.uri}/{path} was read twice, and differs")
    return first


def _find_fault(manifests: Collection[Manifest], folder: str, sizes: Mapping[str, int]) -> str | None:
    """Find what isn't there as these manifests have it. Pure."""
    for manifest in manifests:
        if manifest.folder != folder:
            return f"manifest.{manifest.rank}.json is of {manifest.folder}"
        for record in manifest.objects:
            if record.path not in sizes:
                return f"{record.path} is missing"
            if sizes[record.path] != record.size_bytes:
                return f"{record.path} has {sizes[record.path]} bytes, not {record.size_bytes}"
    return None
