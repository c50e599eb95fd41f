"""A local disk before a root: what is there is used, and whatever is wrong with it nothing comes of it."""

import errno
import os
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepkeeper.checkpoint import (
    BlockReader,
    SaveOrder,
    Structure,
    TensorOrder,
    ValueOrder,
    write_checkpoint,
)
from stepkeeper.checkpoint.manifest import BLOCK_BYTES, Manifest
from stepkeeper.errors import SaveError, StorageError, TornCheckpointError
from stepkeeper.storage.memory import MemoryStore
from stepkeeper.tier import CachedStore, LocalStaging, LocalTier, TierPlace

N_BYTES = BLOCK_BYTES + 4096
"""Two blocks."""

DATA = bytes(range(256)) * (N_BYTES // 256) + b"a value"


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have room on the disk, whatever this machine's has: the tier leaves a part of a disk free."""
    found = SimpleNamespace(f_bavail=1 << 20, f_blocks=1 << 21, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: found)


class Root:
    """In memory, its operations counted."""

    def __init__(self, name: str = "run") -> None:
        self.n: Counter[str] = Counter()
        self.fails: str | None = None
        self.store = MemoryStore(name=name, hook=self._hook)

    def _hook(self, moment: str, operation: str, path: str) -> None:
        if moment == "before":
            self.n[operation] += 1
            if operation == self.fails:
                raise StorageError(errno.EACCES, f"{path}: no")


def order(
    step: int = 1,
    *,
    rank: int = 0,
    world_size: int = 1,
    nonce: str = "ab" * 16,
    aliases: dict[str, str] | None = None,
) -> SaveOrder:
    tensor = TensorOrder(
        fqn=f"w{rank}", dtype="uint8", global_shape=(N_BYTES,), offsets=(0,), sizes=(N_BYTES,), start=0
    )
    value = ValueOrder(fqn=f"n{rank}", start=N_BYTES, length_bytes=len(DATA) - N_BYTES)
    return SaveOrder(
        rank=rank,
        world_size=world_size,
        step=step,
        claim=0,
        nonce=nonce,
        structure=Structure.build([tensor], aliases=aliases),
        values=(value,),
    )


@pytest.fixture
def root() -> Root:
    return Root()


@pytest.fixture
def tier(tmp_path: Path, root: Root) -> LocalTier:
    return LocalTier(TierPlace(folder=str(tmp_path)), root.store.uri)


@pytest.fixture
def staging(root: Root, tier: LocalTier) -> LocalStaging:
    return LocalStaging(root.store, tier)


def copies(folder: Path) -> list[Path]:
    """Return the copies of objects, in all saves that are on that disk."""
    return sorted(path for path in folder.glob("*/*/*/*") if path.is_file())


def saves(folder: Path) -> list[str]:
    return sorted({path.parent.parent.name for path in copies(folder)})


def all_bytes(store: CachedStore | MemoryStore, manifest: Manifest) -> bytes:
    reader = BlockReader(store, [manifest])
    return b"".join(
        reader.read_block(record.path, block)
        for record in manifest.objects
        for block in range(len(record.blocks))
    )


def test_what_came_over_the_disk_is_what_would_have_come_without(tmp_path: Path) -> None:
    direct, by_way = Root(), Root()
    staging = LocalStaging(by_way.store, LocalTier(TierPlace(folder=str(tmp_path)), by_way.store.uri))
    for rank in (0, 1):
        one = order(rank=rank, world_size=2, aliases={"v": "w0"})
        wrote = write_checkpoint(direct.store, one, memoryview(DATA))
        staged = staging.stage(one, memoryview(DATA))
        assert staged == wrote
        staging.upload(staged)
    assert by_way.store.bucket.objects == direct.store.bucket.objects
    assert "1/0-" + "ab" * 16 + "/manifest.1.json" in by_way.store.bucket.objects


def test_once_staged_the_memory_is_not_needed_and_the_root_has_nothing(
    root: Root, staging: LocalStaging
) -> None:
    memory = bytearray(DATA)
    manifest = staging.stage(order(), memoryview(memory))
    memory[:] = bytes(len(memory))
    assert root.store.bucket.objects == {}
    staging.upload(manifest)
    direct = Root()
    write_checkpoint(direct.store, order(), memoryview(DATA))
    assert root.store.bucket.objects == direct.store.bucket.objects


def test_objects_are_as_many_as_the_root_wants(tmp_path: Path) -> None:
    class Streamed(CachedStore):
        streams = 16

    root = Root()
    streamed = Streamed(root.store, LocalTier(TierPlace(folder=str(tmp_path / "other")), "x"))
    tier = LocalTier(TierPlace(folder=str(tmp_path)), streamed.uri)
    manifest = LocalStaging(streamed, tier).stage(order(), memoryview(DATA))
    assert manifest == write_checkpoint(streamed, order(), memoryview(DATA))
    assert len(manifest.objects) > 1


def test_what_is_there_is_read_there(root: Root, tier: LocalTier, staging: LocalStaging) -> None:
    manifest = staging.stage(order(), memoryview(DATA))
    staging.upload(manifest)
    cached_store = CachedStore(root.store, tier)
    assert all_bytes(cached_store, manifest) == all_bytes(cached_store, manifest)
    assert cached_store.take_read_bytes() == 2 * manifest.size_bytes
    assert not root.n["read"]


@pytest.mark.parametrize("how", ["gone", "cut", "flipped", "a folder"])
def test_what_is_wrong_there_is_read_at_the_root_and_there_no_more(
    tmp_path: Path, root: Root, tier: LocalTier, staging: LocalStaging, how: str
) -> None:
    manifest = staging.stage(order(), memoryview(DATA))
    staging.upload(manifest)
    expected = all_bytes(root.store, manifest)
    n_reads = root.n["read"]
    (copy, *_) = copies(tmp_path)
    data = copy.read_bytes()
    copy.unlink()
    if how == "cut":
        copy.write_bytes(data[:1000])
    elif how == "flipped":
        copy.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif how == "a folder":
        copy.mkdir()
    cached_store = CachedStore(root.store, tier)
    assert all_bytes(cached_store, manifest) == expected
    assert root.n["read"] > n_reads
    assert not copy.is_file()


def test_a_bad_copy_that_cannot_be_deleted_is_read_no_more(
    tmp_path: Path, root: Root, tier: LocalTier, staging: LocalStaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = staging.stage(order(), memoryview(DATA))
    staging.upload(manifest)
    for copy in copies(tmp_path):
        copy.write_bytes(bytes(copy.stat().st_size))
    monkeypatch.setattr(tier, "forget", lambda path: None)
    cached_store = CachedStore(root.store, tier)
    assert cached_store.list_copied(f"{manifest.folder}/")
    assert all_bytes(cached_store, manifest) == all_bytes(root.store, manifest)
    assert not cached_store.list_copied(f"{manifest.folder}/")


def test_only_what_is_bad_at_the_root_is_torn(
    tmp_path: Path, root: Root, tier: LocalTier, staging: LocalStaging
) -> None:
    manifest = staging.stage(order(), memoryview(DATA))
    staging.upload(manifest)
    path = f"{manifest.folder}/{manifest.objects[0].path}"
    bad = bytes(len(root.store.bucket.objects[path]))
    root.store.bucket.objects[path] = bad
    all_bytes(CachedStore(root.store, tier), manifest)
    for copy in copies(tmp_path):
        copy.write_bytes(bad)
    n_reads = root.n["read"]
    with pytest.raises(TornCheckpointError, match="read 3 times"):
        all_bytes(CachedStore(root.store, tier), manifest)
    assert root.n["read"] - n_reads == 3


def test_a_disk_that_holds_something_else_by_then_uploads_nothing_of_it(
    tmp_path: Path, root: Root, staging: LocalStaging
) -> None:
    manifest = staging.stage(order(), memoryview(DATA))
    (copy, *_) = copies(tmp_path)
    copy.write_bytes(bytes(copy.stat().st_size))
    with pytest.raises(SaveError, match="not what was put there"):
        staging.upload(manifest)
    assert f"{manifest.folder}/{copy.name}" not in root.store.bucket.objects


def test_an_upload_that_failed_can_be_tried_again_and_else_goes_before_what_was_committed(
    tmp_path: Path, root: Root, staging: LocalStaging
) -> None:
    staging.upload(staging.stage(order(1), memoryview(DATA)))
    manifest = staging.stage(order(2), memoryview(DATA))
    root.fails = "write"
    with pytest.raises(StorageError, match="no"):
        staging.upload(manifest)
    root.fails = None
    staging.upload(manifest)
    assert saves(tmp_path) == ["1", "2"]
    staging.stage(order(3), memoryview(DATA))
    assert saves(tmp_path) == ["2", "3"]
    staging.stage(order(4), memoryview(DATA))
    assert saves(tmp_path) == ["2", "4"]


def test_a_disk_that_gets_full_on_the_way_keeps_nothing(
    tmp_path: Path, staging: LocalStaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.replace

    def full(self: Path, target: Path) -> Path:
        if "_1.distcp" in target.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        staging.stage(order(), memoryview(DATA))
    assert copies(tmp_path) == []


def test_a_disk_that_is_full_takes_nothing_and_keeps_room_for_others(
    tmp_path: Path, staging: LocalStaging, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk(available: int) -> None:
        found = SimpleNamespace(f_bavail=available, f_blocks=1000, f_frsize=N_BYTES // 100)
        monkeypatch.setattr(os, "statvfs", lambda _: found)

    disk(149)
    with pytest.raises(OSError, match="has room for"):
        staging.stage(order(), memoryview(DATA))
    disk(152)
    staging.stage(order(), memoryview(DATA))
    assert saves(tmp_path) == ["1"]


def test_a_bound_is_kept_and_older_saves_make_room(tmp_path: Path, root: Root) -> None:
    def with_bound(most_bytes: int) -> LocalStaging:
        place = TierPlace(folder=str(tmp_path), most_bytes=most_bytes)
        return LocalStaging(root.store, LocalTier(place, root.store.uri))

    with_bound(3 * N_BYTES).stage(order(1), memoryview(DATA))
    with_bound(3 * N_BYTES).stage(order(2), memoryview(DATA))
    assert saves(tmp_path) == ["1", "2"]
    with_bound(3 * N_BYTES // 2).stage(order(3), memoryview(DATA))
    assert saves(tmp_path) == ["3"]
    with pytest.raises(OSError, match="has room for"):
        with_bound(N_BYTES).stage(order(4), memoryview(DATA))


def test_the_bound_is_each_processs_own(tmp_path: Path, root: Root) -> None:
    place = TierPlace(folder=str(tmp_path), most_bytes=N_BYTES + 4096)
    for rank in (0, 1, 10):
        staging = LocalStaging(root.store, LocalTier(place, root.store.uri))
        staging.stage(order(rank=rank, world_size=11), memoryview(DATA))
    assert {path.name.split("_")[2] for path in copies(tmp_path)} == {"0", "1", "10"}


def test_of_other_saves_the_one_used_last_stays(
    tmp_path: Path, root: Root, tier: LocalTier, staging: LocalStaging
) -> None:
    restored = staging.stage(order(1), memoryview(DATA))
    ages(tmp_path, "1", 100)
    LocalStaging(root.store, tier).stage(order(2), memoryview(DATA))
    ages(tmp_path, "2", 50)
    staging.upload(restored)
    all_bytes(CachedStore(root.store, tier), restored)
    staging.stage(order(3), memoryview(DATA))
    assert saves(tmp_path) == ["1", "3"]


def ages(folder: Path, step: str, age_s: int) -> None:
    (save,) = folder.glob(f"*/{step}/*")
    time_s = save.stat().st_mtime - age_s
    os.utime(save, (time_s, time_s))


def test_what_a_kill_left_goes_with_its_save_and_nobody_reads_it(
    tmp_path: Path, root: Root, tier: LocalTier, staging: LocalStaging
) -> None:
    manifest = staging.stage(order(1), memoryview(DATA))
    staging.upload(manifest)
    first = copies(tmp_path)[0]
    first.rename(first.with_name(f".tmp-{first.name}-{'0' * 32}"))
    assert tier.read(f"{manifest.folder}/{first.name}") is None
    ages(tmp_path, "1", 100)
    for step in (2, 3):
        staging.upload(staging.stage(order(step), memoryview(DATA)))
    assert saves(tmp_path) == ["2", "3"]


def test_a_strangers_file_stays_and_so_does_its_folder(tmp_path: Path, staging: LocalStaging) -> None:
    staging.stage(order(1), memoryview(DATA))
    (save,) = tmp_path.glob("*/1/*")
    (save / "notes.txt").write_text("mine")
    (save.parent.parent / "results").mkdir()
    for step in (2, 3, 4):
        staging.upload(staging.stage(order(step), memoryview(DATA)))
    assert [path.name for path in copies(tmp_path) if path.parent == save] == ["notes.txt"]
    assert (save.parent.parent / "results").is_dir()


def test_roots_share_a_disk_and_see_nothing_of_each_other(tmp_path: Path) -> None:
    first, second = Root("one/run"), Root("one-run")
    tiers = [LocalTier(TierPlace(folder=str(tmp_path)), root.store.uri) for root in (first, second)]
    manifest = LocalStaging(first.store, tiers[0]).stage(order(), memoryview(DATA))
    path = f"{manifest.folder}/{manifest.objects[0].path}"
    assert tiers[0].read(path, 0, 10) is not None
    assert tiers[1].read(path, 0, 10) is None
    for step in (2, 3, 4):
        LocalStaging(second.store, tiers[1]).stage(order(step), memoryview(DATA))
    assert tiers[0].read(path, 0, 10) is not None


def test_a_folder_that_others_may_write_to_is_neither_read_nor_written(
    tmp_path: Path, root: Root, tier: LocalTier, staging: LocalStaging
) -> None:
    manifest = staging.stage(order(), memoryview(DATA))
    (folder,) = tmp_path.iterdir()
    folder.chmod(0o777)
    again = LocalTier(TierPlace(folder=str(tmp_path)), root.store.uri)
    assert again.read(f"{manifest.folder}/{manifest.objects[0].path}") is None
    with pytest.raises(PermissionError, match="others may write to it"):
        LocalStaging(root.store, again).stage(order(2), memoryview(DATA))


def test_a_disk_that_is_not_mounted_is_not_made(tmp_path: Path, root: Root) -> None:
    place = TierPlace(folder=str(tmp_path / "ssd" / "tier"))
    with pytest.raises(FileNotFoundError):
        LocalStaging(root.store, LocalTier(place, root.store.uri)).stage(order(), memoryview(DATA))
    (tmp_path / "ssd").mkdir()
    LocalStaging(root.store, LocalTier(place, root.store.uri)).stage(order(), memoryview(DATA))
    assert saves(tmp_path / "ssd" / "tier") == ["1"]


def test_many_processes_put_and_make_room_at_once(tmp_path: Path, root: Root) -> None:
    failures: list[BaseException] = []

    def save(rank: int) -> None:
        staging = LocalStaging(root.store, LocalTier(TierPlace(folder=str(tmp_path)), root.store.uri))
        try:
            for step in range(1, 6):
                barrier.wait()
                staging.upload(staging.stage(small(order(step, rank=rank, world_size=4)), memoryview(DATA)))
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert saves(tmp_path) == ["4", "5"]
    assert len(copies(tmp_path)) == 8


def small(one: SaveOrder) -> SaveOrder:
    return replace(one, structure=Structure())
