"""Verify every block of a commit against its checksum, by reads only."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from stepkeeper.checkpoint.manifest import Manifest, ObjectRecord, manifest_name
from stepkeeper.checkpoint.reading import BlockReader, read_manifest
from stepkeeper.errors import ManifestError, TornCheckpointError
from stepkeeper.log import CommitRecord
from stepkeeper.storage import Store
from stepkeeper.storage.retry import Patience

__all__ = ["BadObject", "CommitFindings", "verify_commit"]

_THREADS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BadObject:
    """An object of a commit that isn't as it was written."""

    name: str
    """Path, relative to the commit's folder."""

    block: int | None
    """Number of the bad block; None: the whole object."""

    fault: str
    """Description of the fault, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFindings:
    """All that was found while a commit was verified."""

    n_objects: int
    size_bytes: int
    """Number of bytes that were read and compared."""

    bad: tuple[BadObject, ...]
    unlisted: tuple[str, ...]
    """Files in the folder that no manifest lists. They don't make the commit bad, but gc doesn't remove them."""


def verify_commit(
    store: Store,
    commit: CommitRecord,
    *,
    patience: Patience,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> CommitFindings:
    """Find objects and blocks of `commit` that aren't as they were written. Each is read up to three times.

    `on_bytes` is called, in any thread, with each number of bytes that was verified. Raises StorageError.
    """
    listed = patience.retry(lambda: store.list(f"{commit.folder}/"))
    sizes = {stat.path.removeprefix(f"{commit.folder}/"): stat.size_bytes for stat in listed}
    manifests, bad = _read_all_manifests(store, commit, patience)
    done = {commit.manifest.path, *(manifest_name(manifest.rank) for manifest in manifests)}
    on_bytes(sum(sizes.get(name, 0) for name in done))
    done |= {each.name for each in bad}
    # Rank 0's manifest lists the other manifests as objects too. They are verified already.
    objects = [record for manifest in manifests for record in manifest.objects]
    to_read = [record for record in objects if record.path not in done]
    bad += _find_other_sizes(to_read, sizes)
    existing = [record for record in to_read if record.path in sizes]
    bad += _find_bad_blocks(store, manifests, existing, patience, on_bytes)
    expected = {record.path for record in objects} | done
    return CommitFindings(
        n_objects=len(expected),
        size_bytes=sum(sizes.get(name, 0) for name in expected),
        bad=tuple(bad),
        # A bad manifest may have listed any of these files.
        unlisted=() if bad else tuple(sorted(set(sizes) - expected)),
    )


def _read_all_manifests(
    store: Store, commit: CommitRecord, patience: Patience
) -> tuple[list[Manifest], list[BadObject]]:
    """Read rank 0's manifest, check it against the commit's entry, and the others against rank 0's.

    Returns those that are right, and a description of the others.
    """
    try:
        first = read_manifest(store, commit.folder, commit.manifest, patience=patience)
    except (TornCheckpointError, ManifestError) as error:
        return [], [BadObject(name=commit.manifest.path, block=None, fault=str(error))]
    found, bad = [first], []
    listed = {record.path: record for record in first.objects}
    for rank in range(1, first.world_size):
        name = manifest_name(rank)
        if name not in listed:
            bad.append(BadObject(name=name, block=None, fault="rank 0's manifest doesn't list it"))
            continue
        try:
            found.append(read_manifest(store, commit.folder, listed[name].make_ref(), patience=patience))
        except (TornCheckpointError, ManifestError) as error:
            bad.append(BadObject(name=name, block=None, fault=str(error)))
    return found, bad


def _find_other_sizes(objects: Sequence[ObjectRecord], sizes: dict[str, int]) -> list[BadObject]:
    bad = []
    for record in objects:
        size_bytes = sizes.get(record.path)
        if size_bytes is None:
            bad.append(BadObject(name=record.path, block=None, fault="is missing"))
        elif size_bytes != record.size_bytes:
            fault = f"has {size_bytes} bytes instead of {record.size_bytes}"
            bad.append(BadObject(name=record.path, block=None, fault=fault))
    return bad


def _find_bad_blocks(
    store: Store,
    manifests: Sequence[Manifest],
    objects: Sequence[ObjectRecord],
    patience: Patience,
    on_bytes: Callable[[int], None],
) -> list[BadObject]:
    if not manifests:
        return []
    reader = BlockReader(store, manifests, patience=patience)

    def check(record: ObjectRecord, block: int) -> BadObject | None:
        try:
            data = reader.read_block(record.path, block)
        except TornCheckpointError as error:
            return BadObject(name=record.path, block=block, fault=str(error))
        on_bytes(len(data))
        return None

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="stepkeeper-verify") as pool:
        blocks = ((record, block) for record in objects for block in range(len(record.blocks)))
        return [bad for bad in pool.map(lambda each: check(*each), blocks) if bad is not None]
