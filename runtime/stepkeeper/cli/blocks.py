"""Every block of a commit against its checksum. Reads only."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from stepkeeper.checkpoint import CheckpointReader
from stepkeeper.checkpoint.manifest import BLOCK_BYTES, Manifest, ObjectRecord, manifest_name
from stepkeeper.checkpoint.reading import read_manifest
from stepkeeper.errors import ManifestError, TornCheckpointError
from stepkeeper.log import CommitRecord, ManifestRef
from stepkeeper.storage import Store
from stepkeeper.storage.retry import Patience

__all__ = ["BadObject", "Verification", "verify_commit"]

_THREADS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BadObject:
    name: str
    """Relative to the commit's folder."""

    block: int | None
    """None: the whole of it."""

    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    n_objects: int
    size_bytes: int
    """Read and compared."""

    bad: tuple[BadObject, ...]
    alien: tuple[str, ...]
    """Files in the folder that no manifest lists: no fault of the commit, but no collection removes them."""


def verify_commit(
    store: Store,
    commit: CommitRecord,
    *,
    patience: Patience,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> Verification:
    """What of `commit` isn't as it was written, each block read up to three times. Raises StorageError."""
    listed = patience.retry(lambda: store.list(f"{commit.folder}/"))
    sizes = {stat.path.removeprefix(f"{commit.folder}/"): stat.size_bytes for stat in listed}
    manifests, bad = _manifests(store, commit, patience)
    proven = {commit.manifest.path, *(manifest_name(manifest.rank) for manifest in manifests)}
    on_bytes(sum(sizes.get(name, 0) for name in proven))
    proven |= {each.name for each in bad}
    objects = [record for manifest in manifests for record in manifest.objects]
    to_read = [record for record in objects if record.path not in proven]
    bad += _other_sizes(to_read, sizes)
    bad += _bad_blocks(
        store, manifests, [record for record in to_read if record.path in sizes], patience, on_bytes
    )
    expected = {record.path for record in objects} | proven
    return Verification(
        n_objects=len(expected),
        size_bytes=sum(sizes.get(name, 0) for name in expected),
        bad=tuple(bad),
        # Without a manifest it isn't known what it would have listed.
        alien=() if bad else tuple(sorted(set(sizes) - expected)),
    )


def _manifests(
    store: Store, commit: CommitRecord, patience: Patience
) -> tuple[list[Manifest], list[BadObject]]:
    """Those that are as the commit entry, and then rank 0's, says; and those that aren't."""
    try:
        first = read_manifest(store, commit.folder, commit.manifest, patience=patience)
    except (TornCheckpointError, ManifestError) as error:
        return [], [BadObject(name=commit.manifest.path, block=None, says=str(error))]
    found, bad = [first], []
    listed = {record.path: record for record in first.objects}
    for rank in range(1, first.world_size):
        name = manifest_name(rank)
        if name not in listed:
            bad.append(BadObject(name=name, block=None, says="rank 0's manifest doesn't list it"))
            continue
        record = listed[name]
        ref = ManifestRef(path=name, size_bytes=record.size_bytes, crc32c=record.crc32c)
        try:
            found.append(read_manifest(store, commit.folder, ref, patience=patience))
        except (TornCheckpointError, ManifestError) as error:
            bad.append(BadObject(name=name, block=None, says=str(error)))
    return found, bad


def _other_sizes(objects: Sequence[ObjectRecord], sizes: dict[str, int]) -> list[BadObject]:
    bad = []
    for record in objects:
        size_bytes = sizes.get(record.path)
        if size_bytes is None:
            bad.append(BadObject(name=record.path, block=None, says="is missing"))
        elif size_bytes != record.size_bytes:
            says = f"has {size_bytes} bytes instead of {record.size_bytes}"
            bad.append(BadObject(name=record.path, block=None, says=says))
    return bad


def _bad_blocks(
    store: Store,
    manifests: Sequence[Manifest],
    objects: Sequence[ObjectRecord],
    patience: Patience,
    on_bytes: Callable[[int], None],
) -> list[BadObject]:
    if not manifests:
        return []
    reader = CheckpointReader(store, manifests, patience=patience)

    def check(record: ObjectRecord, block: int) -> BadObject | None:
        start = block * BLOCK_BYTES
        length = min(BLOCK_BYTES, record.size_bytes - start)
        try:
            reader.read_verified(record.path, start, length)
        except TornCheckpointError as error:
            return BadObject(name=record.path, block=block, says=str(error))
        on_bytes(length)
        return None

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="stepkeeper-verify") as pool:
        checks = [
            pool.submit(partial(check, record, block))
            for record in objects
            for block in range(len(record.blocks))
        ]
        try:
            results = [each.result() for each in checks]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [result for result in results if result is not None]
