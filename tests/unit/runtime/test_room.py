"""The line about the room on a disk, after the first commit of a training."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stepkeeper import CheckpointManager
from stepkeeper.policy.keep import AnyOf, BestN, EveryNSteps, KeepPolicy, LastN, MaxAge
from stepkeeper.save.room import count_kept, log_room

URI = "file:///runs/a%20b"


@pytest.fixture(autouse=True)
def disk(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    """A disk with 10 KiB left. The list has the paths that were asked for."""
    asked: list[str] = []

    def statvfs(path: str) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(f_bavail=5, f_frsize=2048)

    monkeypatch.setattr("stepkeeper.save.room.os", SimpleNamespace(statvfs=statvfs))
    caplog.set_level(logging.INFO)
    return asked


@pytest.mark.parametrize(
    ("keep", "size_bytes", "level", "end"),
    [
        (LastN(3), 1024, "INFO", "room for 10 more steps like this one (1.0 KiB), and retention keeps 3"),
        (LastN(10), 1024, "INFO", "and retention keeps 10"),
        (
            LastN(11),
            1024,
            "WARNING",
            "and retention keeps 11: it will be full; keep fewer, or use another disk",
        ),
        (None, 1024, "INFO", "and retention does not limit their number"),
        (
            LastN(1),
            20480,
            "WARNING",
            "and retention keeps 1: it will be full; keep fewer, or use another disk",
        ),
    ],
)
def test_the_room_is_compared_with_what_retention_keeps(
    keep: KeepPolicy | None,
    size_bytes: int,
    level: str,
    end: str,
    disk: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    log_room(URI, size_bytes, keep)
    (record,) = caplog.records
    assert record.levelname == level
    assert record.getMessage().endswith(end)
    assert disk == ["/runs/a b"]


def test_nothing_is_known_of_a_bucket(disk: list[str], caplog: pytest.LogCaptureFixture) -> None:
    log_room("gs://bucket/run", 1024, LastN(3))
    assert (disk, caplog.records) == ([], [])


@pytest.mark.parametrize(
    ("policy", "n"),
    [
        (AnyOf((LastN(2), BestN(3, "loss", "min", keep_without=False))), 5),
        (AnyOf((LastN(2), BestN(3, "loss", "min"))), None),
        (EveryNSteps(100), None),
        (AnyOf((LastN(2), MaxAge(60))), None),
    ],
)
def test_how_many_a_policy_keeps_at_most(policy: KeepPolicy, n: int | None) -> None:
    assert count_kept(policy) == n


def test_it_is_logged_once_and_not_after_a_restore(tmp_path: Path, disk: list[str]) -> None:
    state = {"w": torch.zeros(8)}
    for last in (2, 4):
        with CheckpointManager(tmp_path / "root", save=1, keep=2) as manager:
            restored = manager.restore(state)
            for step in range(restored.step + 1 if restored else 1, last + 1):
                manager.step(step, state)
    assert disk == [str(tmp_path / "root")]
