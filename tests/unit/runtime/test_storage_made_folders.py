"""Test what a folder that can't be made means: a deletion beside it, or a place that takes no folders."""

import errno
from pathlib import Path
from typing import Any

import pytest

from stepkeeper.errors import StorageError, TransientStorageError
from stepkeeper.storage.posix import PosixStore


@pytest.mark.parametrize("how", ["put_if_absent", "write"])
def test_a_root_that_takes_no_folders_is_no_passing_fault(how: str) -> None:
    store = PosixStore(Path("/proc/stepkeeper-root"))
    with pytest.raises(StorageError, match=r"no folder can be made in /proc, though it is there") as raised:
        store.put_if_absent("a/b", b"") if how == "put_if_absent" else store.write("a/b", [b""])
    assert not isinstance(raised.value, TransientStorageError)


def test_a_folder_that_is_taken_away_and_made_again_at_once_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "20").mkdir()
    make = Path.mkdir
    lost: list[Path] = []

    def lose(folder: Path, *arguments: Any, **options: Any) -> None:
        if not lost:
            lost.append(folder)
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder))
        make(folder, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", lose)
    PosixStore(tmp_path).write("20/4-new/__0_0.distcp", [b"data"])
    assert lost == [tmp_path / "20" / "4-new"]
