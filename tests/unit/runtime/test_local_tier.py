"""Test a local disk before a root: its copies are used, and no fault of it does any harm."""

import errno
import os
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepkeeper.checkpoint.manifest import BLOCK_BYTES, Manifest
from stepkeeper.checkpoint.orders import SaveOrder, Structure, ValueOrder
from stepkeeper.checkpoint.reading import BlockReader
from stepkeeper.checkpoint.writing import write_checkpoint
from stepkeeper.errors import SaveError, StorageError, TornCheckpointError
from stepkeeper.tier import CachedStore, LocalStaging, LocalTier, TierPlace
from stepkeeper_testing.checkpoints import save_order, tensor_order
from stepkeeper_testing.memory import MemoryStore

N_BYTES = BLOCK_BYTES + 4096
"""Two blocks."""

DATA = bytes(range(256)) * (N_BYTES // 256) + b"a value"


def set_room(monkeypatch: pytest.MonkeyPatch, available: int, blocks: int, block_bytes: int) -> None:
    found = SimpleNamespace(f_bavail=available, f_blocks=blocks, f_frsize=block_bytes)
    monkeypatch.setattr(os, "statvfs", lambda _: found)


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have room on the disk, whatever this machine's has: the tier leaves a part of a disk free."""
    set_room(monkeypatch, 1 << 20, 1 << 21, 4096)


def order(
    step: int = 1, *, rank: int = 0, world_size: int = 1, aliases: dict[str, str] | None = None
) -> SaveOrder:
    tensor = tensor_order(f"w{rank}", (N_BYTES,), dtype="uint8")
    value = ValueOrder(fqn=f"n{rank}", start=N_BYTES, length_bytes=len(DATA) - N_BYTES)
    return save_order([tensor], [value], rank=rank, world_size=world_size, step=step, aliases=aliases)


class Disk:
    """A root in memory whose operations are counted, and the disk before it."""

    def __init__(self, folder: Path, *, most_bytes: int | None = None) -> None:
        self.n: Counter[str] = Counter()
        self.fails: str | None = None
        self.folder = folder
        self.root = MemoryStore(name="run", hook=self._hook)
        self.tier = LocalTier(TierPlace(folder=str(folder), most_bytes=most_bytes), self.root.uri)
        self.staging = LocalStaging(self.root, self.tier)

    def _hook(self, moment: str, operation: str, path: str) -> None:
        if moment == "before":
            self.n[operation] += 1
            if operation == self.fails:
                raise StorageError(errno.EACCES, f"{path}: no")

    @property
    def cached(self) -> CachedStore:
        return CachedStore(self.root, self.tier)

    def stage(self, step: int = 1) -> Manifest:
        return self.staging.stage(order(step), memoryview(DATA))

    def save(self, step: int = 1) -> Manifest:
        manifest = self.stage(step)
        self.staging.upload(manifest)
        return manifest

    def copies(self) -> list[Path]:
        """Return the copies of objects, in all saves that are on that disk."""
        return sorted(path for path in self.folder.glob("*/*/*/*") if path.is_file())

    def steps(self) -> list[str]:
        return sorted({path.parent.parent.name for path in self.copies()})

    def overwrite(self) -> None:
        for copy in self.copies():
            copy.write_bytes(bytes(copy.stat().st_size))

    def age(self, step: int, age_s: int) -> None:
        (save,) = self.folder.glob(f"*/{step}/*")
        time_s = save.stat().st_mtime - age_s
        os.utime(save, (time_s, time_s))


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def all_bytes(store: CachedStore | MemoryStore, manifest: Manifest) -> bytes:
    reader = BlockReader(store, [manifest])
    return b"".join(
        reader.read_block(record.path, block)
        for record in manifest.objects
        for block in range(len(record.blocks))
    )


def test_once_staged_the_memory_is_not_needed_and_the_root_has_nothing(disk: Disk) -> None:
    direct = MemoryStore()
    for rank in (0, 1):
        one, memory = order(rank=rank, world_size=2, aliases={"v": "w0"}), bytearray(DATA)
        manifest = disk.staging.stage(one, memoryview(memory))
        memory[:] = bytes(len(memory))
        assert not any(f"__{rank}_" in path for path in disk.root.bucket.objects)
        disk.staging.upload(manifest)
        assert manifest == write_checkpoint(direct, one, memoryview(DATA))
        all_bytes(disk.cached, manifest)
    assert not disk.n["read"], "what is there is read there"
    assert disk.root.bucket.objects == direct.bucket.objects


@pytest.mark.parametrize("how", ["gone", "cut", "flipped", "a folder"])
def test_what_is_wrong_there_is_read_at_the_root_and_there_no_more(disk: Disk, how: str) -> None:
    manifest = disk.save()
    expected, n_reads = all_bytes(disk.root, manifest), disk.n["read"]
    (copy, *_) = disk.copies()
    data = copy.read_bytes()
    copy.unlink()
    if how == "cut":
        copy.write_bytes(data[:1000])
    elif how == "flipped":
        copy.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif how == "a folder":
        copy.mkdir()
    assert all_bytes(disk.cached, manifest) == expected
    assert disk.n["read"] > n_reads
    assert not copy.is_file()


def test_only_what_is_bad_at_the_root_is_torn(disk: Disk) -> None:
    manifest = disk.save()
    path = f"{manifest.folder}/{manifest.objects[0].path}"
    disk.root.bucket.objects[path] = bytes(len(disk.root.bucket.objects[path]))
    all_bytes(disk.cached, manifest)
    disk.overwrite()
    n_reads = disk.n["read"]
    with pytest.raises(TornCheckpointError, match="read 3 times"):
        all_bytes(disk.cached, manifest)
    assert disk.n["read"] - n_reads == 3


def test_a_disk_that_holds_something_else_by_then_uploads_nothing_of_it(disk: Disk) -> None:
    manifest = disk.stage()
    disk.overwrite()
    with pytest.raises(SaveError, match="differs from the bytes that were put there"):
        disk.staging.upload(manifest)
    assert f"{manifest.folder}/{disk.copies()[0].name}" not in disk.root.bucket.objects


def test_an_upload_that_failed_can_be_tried_again_and_else_goes_before_what_was_committed(disk: Disk) -> None:
    disk.save(1)
    manifest = disk.stage(2)
    disk.fails = "write"
    with pytest.raises(StorageError, match="no"):
        disk.staging.upload(manifest)
    disk.fails = None
    disk.staging.upload(manifest)
    assert disk.steps() == ["1", "2"]
    disk.stage(3)
    assert disk.steps() == ["2", "3"]
    disk.stage(4)
    assert disk.steps() == ["2", "4"]


def test_a_disk_that_gets_full_on_the_way_keeps_nothing(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.replace

    def full(self: Path, target: Path) -> Path:
        if "_1.distcp" in target.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        disk.stage()
    assert disk.copies() == []


def test_a_disk_that_is_full_takes_nothing_and_keeps_room_for_others(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_room(monkeypatch, 149, 1000, N_BYTES // 100)
    with pytest.raises(OSError, match="has room for"):
        disk.stage()
    set_room(monkeypatch, 152, 1000, N_BYTES // 100)
    disk.stage()
    assert disk.steps() == ["1"]


def test_a_bound_is_kept_and_older_saves_make_room(tmp_path: Path) -> None:
    for step in (1, 2):
        disk = Disk(tmp_path, most_bytes=3 * N_BYTES)
        disk.stage(step)
    assert disk.steps() == ["1", "2"]
    Disk(tmp_path, most_bytes=3 * N_BYTES // 2).stage(3)
    assert disk.steps() == ["3"]
    with pytest.raises(OSError, match="has room for"):
        Disk(tmp_path, most_bytes=N_BYTES).stage(4)


def test_of_other_saves_the_one_used_last_stays(disk: Disk) -> None:
    restored = disk.stage(1)
    disk.age(1, 100)
    LocalStaging(disk.root, disk.tier).stage(order(2), memoryview(DATA))
    disk.age(2, 50)
    disk.staging.upload(restored)
    all_bytes(disk.cached, restored)
    disk.stage(3)
    assert disk.steps() == ["1", "3"]


def test_what_a_kill_left_goes_with_its_save_and_is_never_read(disk: Disk) -> None:
    manifest = disk.save(1)
    first = disk.copies()[0]
    first.rename(first.with_name(f".tmp-{first.name}-{'0' * 32}"))
    assert disk.tier.read(f"{manifest.folder}/{first.name}") is None
    disk.age(1, 100)
    disk.save(2)
    disk.save(3)
    assert disk.steps() == ["2", "3"]


def test_a_strangers_file_stays_and_so_does_its_folder(disk: Disk) -> None:
    disk.stage(1)
    (save,) = disk.folder.glob("*/1/*")
    (save / "notes.txt").write_text("mine")
    (save.parent.parent / "results").mkdir()
    for step in (2, 3, 4):
        disk.save(step)
    assert [path.name for path in disk.copies() if path.parent == save] == ["notes.txt"]
    assert (save.parent.parent / "results").is_dir()


def test_a_folder_that_others_may_write_to_is_neither_read_nor_written(disk: Disk) -> None:
    manifest = disk.stage()
    (folder,) = disk.folder.iterdir()
    folder.chmod(0o777)
    again = Disk(disk.folder)
    assert again.tier.read(f"{manifest.folder}/{manifest.objects[0].path}") is None
    with pytest.raises(PermissionError, match="others may write to it"):
        again.stage(2)


def test_many_processes_put_and_make_room_at_once(disk: Disk) -> None:
    barrier = threading.Barrier(4, timeout=60)

    def save(rank: int) -> None:
        staging = LocalStaging(disk.root, LocalTier(TierPlace(folder=str(disk.folder)), disk.root.uri))
        for step in range(1, 6):
            barrier.wait()
            one = replace(order(step, rank=rank, world_size=4), structure=Structure())
            staging.upload(staging.stage(one, memoryview(DATA)))

    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(save, range(4)))
    assert disk.steps() == ["4", "5"]
    assert len(disk.copies()) == 8
