"""Check by their manifests whether saves in a root are whole."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from stepkeeper.checkpoint.manifest import Manifest, claim_of, manifest_name
from stepkeeper.checkpoint.reading import read_manifests
from stepkeeper.errors import ManifestError, MissingObjectError, TornCheckpointError, TransientStorageError
from stepkeeper.log import CommitRecord, ManifestRef
from stepkeeper.log.tail import read_over_new_connection
from stepkeeper.storage import Store
from stepkeeper.storage.crc import crc32c
from stepkeeper.storage.retry import Patience

__all__ = ["FoundSave", "inspect_save"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSave:
    """A finished save: rank 0's manifest, which is written last, is in its folder."""

    record: CommitRecord
    """Its record as of its commit, except for the slot, the parent and the metrics."""

    fault: str | None = None
    """The first difference from its manifests. None: all objects exist with the listed sizes."""


def inspect_save(store: Store, folder: str, sizes: Mapping[str, int], patience: Patience) -> FoundSave:
    """Compare the objects of a finished save, with these sizes, with its manifests. Raises StorageError.

    Tensor files aren't read.
    """
    path = manifest_name(0)
    data = patience.retry(lambda: _read_twice(store, f"{folder}/{path}"))
    record = CommitRecord(
        slot=0,
        claim=claim_of(folder),
        step=int(folder.partition("/")[0]),
        folder=folder,
        size_bytes=sum(sizes.values()),
        # The commit's own record isn't known: this one names the manifest as it is stored now.
        manifest=ManifestRef(path=path, size_bytes=len(data), crc32c=crc32c(data)),
    )
    try:
        fault = _find_fault(read_manifests(store, record, patience=patience), folder, sizes)
    except (TornCheckpointError, ManifestError) as error:
        fault = str(error)
    return FoundSave(record=record, fault=fault)


def _read_twice(store: Store, path: str) -> bytes:
    """Read an object twice, the second time over a new connection, because its checksum isn't known.

    Raises TransientStorageError if the two reads differ.
    """
    try:
        first, second = store.read(path), read_over_new_connection(store, path)
    except MissingObjectError as error:
        raise TransientStorageError(f"{store.uri}/{path} is listed, but isn't found") from error
    if first != second:
        raise TransientStorageError(f"two reads of {store.uri}/{path} differ")
    return first


def _find_fault(manifests: Collection[Manifest], folder: str, sizes: Mapping[str, int]) -> str | None:
    """Find the first difference between these manifests and the objects. Pure."""
    for manifest in manifests:
        if manifest.folder != folder:
            return f"manifest.{manifest.rank}.json is of {manifest.folder}"
        for record in manifest.objects:
            if record.path not in sizes:
                return f"{record.path} is missing"
            if sizes[record.path] != record.size_bytes:
                return f"{record.path} has {sizes[record.path]} bytes, not {record.size_bytes}"
    return None
