"""Test the times of a root's objects, by the store's own clock."""

import os
from pathlib import Path

import pytest

from stepkeeper.errors import StorageError
from stepkeeper.log import CommitRecord
from stepkeeper.log.store_times import StoreTimes
from stepkeeper.storage.memory import MemoryStore
from stepkeeper_testing.checkpoints import SmallRoot


@pytest.fixture
def root(tmp_path: Path) -> SmallRoot:
    root = SmallRoot((tmp_path / "root").as_uri())
    root.begin()
    return root


def aged(root: SmallRoot, path: str, time_unix_s: float) -> None:
    os.utime(Path(root.url.removeprefix("file://"), path), (time_unix_s, time_unix_s))


def manifest_of(record: CommitRecord) -> str:
    return f"{record.folder}/{record.manifest.path}"


def test_a_commit_is_as_old_as_its_manifest_and_asked_for_once(root: SmallRoot) -> None:
    first, second = root.save(10), root.save(20)
    aged(root, manifest_of(first), 1000.5)
    aged(root, manifest_of(second), 2000.5)
    times = StoreTimes(root.store)
    assert times.of_commits([first]) == {first.slot: 1000.5}
    aged(root, manifest_of(first), 5000.0)
    assert times.of_commits([first, second]) == {first.slot: 1000.5, second.slot: 2000.5}
    assert StoreTimes(root.store).of_commits([first]) == {first.slot: 5000.0}


def test_entries_are_as_far_apart_as_the_store_has_them(root: SmallRoot) -> None:
    root.begin(attempt=1)
    aged(root, ".stepkeeper/log/00000000.json", 1000.0)
    aged(root, ".stepkeeper/log/00000001.json", 8200.9)
    assert StoreTimes(root.store).between_s(0, 1) == 7200
    assert StoreTimes(root.store).between_s(0, 2) is None, "it isn't there"


def test_where_the_store_says_nothing_nothing_is_known(
    root: SmallRoot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record = root.save(10)
    silent = MemoryStore()
    silent.put_if_absent(manifest_of(record), b"{}")
    silent.put_if_absent(".stepkeeper/log/00000000.json", b"{}")
    silent.bucket.times_unix_s.clear()
    assert StoreTimes(silent).of_commits([record]) == {}
    assert StoreTimes(silent).between_s(0, 0) is None

    def refuse(prefix: str) -> list[object]:
        raise StorageError(13, f"no listing of {prefix}")

    monkeypatch.setattr(root.store, "list", refuse)
    assert StoreTimes(root.store).between_s(0, 0) is None
    assert "how long" in caplog.text
    with pytest.raises(StorageError):
        StoreTimes(root.store).of_commits([record])
