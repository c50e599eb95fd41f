"""Test that a folder is emptied at once, however long the deletion takes."""

import os
import time
from pathlib import Path

import pytest

from stepcluster.discarding import discard


def fill(folder: Path) -> None:
    (folder / "nodes" / "system").mkdir(parents=True)
    (folder / "nodes" / "system" / "disk").write_text("bytes", encoding="utf-8")
    (folder / "nodes" / "link").symlink_to(folder)
    (folder / "cluster.json").write_text("{}", encoding="utf-8")


def wait_until_empty(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while any(folder.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_all_files_are_deleted_and_the_folder_stays(tmp_path: Path) -> None:
    folder, trash = tmp_path / "clusters" / "a", tmp_path / "discarded"
    fill(folder)
    kept = folder.stat().st_ino
    discard(folder, trash, patience_s=60)
    assert list(folder.iterdir()) == []
    assert folder.stat().st_ino == kept, "whoever waits for its lock waits for this folder"
    assert list(trash.iterdir()) == []


def test_an_empty_folder_is_no_problem(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    discard(tmp_path / "a", tmp_path / "discarded", patience_s=60)
    assert list((tmp_path / "a").iterdir()) == []


def test_nobody_waits_longer_than_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program in place of `rm` that takes its time, as a slow disk does."""
    folder, trash, programs = tmp_path / "a", tmp_path / "discarded", tmp_path / "bin"
    fill(folder)
    programs.mkdir()
    released = programs / "released"
    rm = programs / "rm"
    rm.write_text(
        f'#!/bin/sh\nuntil [ -e {released} ]; do sleep 0.05; done\nexec /bin/rm "$@"\n', encoding="utf-8"
    )
    rm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    try:
        discard(folder, trash, patience_s=0.1)
        assert list(folder.iterdir()) == []
        assert len(list(trash.iterdir())) == 1
        assert "still being deleted" in capsys.readouterr().err
    finally:
        released.touch()
    wait_until_empty(trash)


def test_what_an_earlier_deletion_left_goes_too(tmp_path: Path) -> None:
    folder, trash = tmp_path / "a", tmp_path / "discarded"
    fill(folder)
    fill(trash / "discarded-earlier")
    discard(folder, trash, patience_s=60)
    assert list(trash.iterdir()) == []
