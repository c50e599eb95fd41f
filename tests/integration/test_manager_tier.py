"""Saves by way of a local disk: memory is free before the root has them, and only what the root has is committed."""

import logging
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from fork_server import ForkServer

from stepkeeper import CheckpointManager
from stepkeeper.contract import ExitCode
from stepkeeper.log import CommitEntry, Log, QuarantineEntry, RestoredEntry
from stepkeeper.storage import open_store
from stepkeeper.storage.posix import PosixStore
from stepkeeper_testing.damage import flip
from stepkeeper_testing.trainer import open_manager

HERE: Final = Path(__file__).parent / "manager_tier"


@pytest.fixture
def root(folder_with_room: Path) -> Path:
    return folder_with_room / "root"


@pytest.fixture
def disk(folder_with_room: Path) -> Path:
    return folder_with_room / "disk"


@pytest.fixture
def reads(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of what this process has read of the root's data."""
    paths: list[str] = []
    real = PosixStore.read

    def read(store: PosixStore, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path.endswith(".distcp") and store.uri == root.as_uri():
            paths.append(path)
        return real(store, path, offset, length)

    monkeypatch.setattr(PosixStore, "read", read)
    return paths


def manager_of(root: Path, disk: Path, **options: Any) -> CheckpointManager:
    return open_manager(root, local_tier=disk, take_over=True, **options)


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(step)), "n": step}


def check_restored(root: Path, disk: Path, step: int) -> None:
    state = state_at(0)
    with manager_of(root, disk) as manager:
        result = manager.restore(state)
        assert result is not None
        assert (result.step, state["n"]) == (step, step)
        assert torch.equal(torch.as_tensor(state["w"]), torch.full((3000,), float(step)))


def kinds(root: Path) -> list[type]:
    log = Log(open_store(root.as_uri()))
    return [type(log.entry(slot).body) for slot in range(log.open().tail + 1)]


def copies(disk: Path) -> list[Path]:
    return sorted(disk.glob("*/*/*/*.distcp"))


def saved(root: Path, disk: Path, *steps: int) -> None:
    with manager_of(root, disk) as manager:
        for step in steps:
            manager.save(step, state_at(step)).result()


def test_a_restore_reads_none_of_the_roots_data(root: Path, disk: Path, reads: list[str]) -> None:
    saved(root, disk, 1, 2, 3)
    assert [path.parent.parent.name for path in copies(disk)] == ["2", "3"]
    check_restored(root, disk, 3)
    assert reads == []
    assert RestoredEntry not in kinds(root), "nobody has seen that the root's bytes are right"


def cut(copy: Path) -> None:
    copy.write_bytes(copy.read_bytes()[:-100])


def lose(copy: Path) -> None:
    shutil.rmtree(copy.parents[3])


@pytest.mark.parametrize("harm", [flip, cut, lose])
def test_what_is_bad_or_gone_there_is_read_at_the_root_and_condemns_nothing(
    root: Path, disk: Path, reads: list[str], harm: Callable[[Path], None]
) -> None:
    saved(root, disk, 1)
    (copy,) = copies(disk)
    harm(copy)
    check_restored(root, disk, 1)
    assert len(reads) == 1
    assert copies(disk) == []
    check_restored(root, disk, 1)
    assert QuarantineEntry not in kinds(root)
    assert kinds(root)[-1] is RestoredEntry, "all of it was read at the root"


@pytest.mark.parametrize("ending", ["killed", "told"])
def test_a_step_that_only_a_local_disk_has_is_never_restored(
    torch_server: ForkServer,
    root: Path,
    disk: Path,
    hold: Path,
    folder_with_room: Path,
    reads: list[str],
    ending: str,
) -> None:
    trainer = torch_server.start([HERE / "trainer.py", folder_with_room, ending], stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    try:
        assert trainer.stdout.readline() == "staged\n"
        if ending == "told":
            # It goes in time all the same.
            assert trainer.wait(60) == ExitCode.SAVED
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
        trainer.stdout.close()
    assert [path.parent.parent.name for path in copies(disk)] == ["1", "2"]
    hold.unlink()
    check_restored(root, disk, 1)
    assert reads == []
    assert kinds(root).count(CommitEntry) == 1
    # What was used stays, the save that came to nothing goes first.
    saved(root, disk, 3)
    assert [path.parent.parent.name for path in copies(disk)] == ["1", "3"]
    check_restored(root, disk, 3)


def test_a_disk_that_does_not_take_it_fails_no_save(
    root: Path, disk: Path, caplog: pytest.LogCaptureFixture, reads: list[str]
) -> None:
    with manager_of(root, disk, local_tier_bytes=1000) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step)).result()
    with manager_of(root, disk / "not" / "there") as manager:
        manager.save(3, state_at(3)).result()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 2
    assert said[0].startswith("step 1 is written to the root without")
    assert "has room for 1000 bytes" in said[0]
    assert str(disk / "not" / "there") in said[1]
    assert copies(disk) == []
    check_restored(root, disk, 3)
    assert len(reads) == 1
