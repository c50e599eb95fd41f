"""Test what a restore that takes long logs while it goes on."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager
from stepkeeper.checkpoint.reading import read_manifest_bytes
from stepkeeper.restore import loading, progress
from stepkeeper.restore.progress import RestoreProgress

GIB = 1024**3


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "stepkeeper")
    return caplog


def test_a_line_comes_every_five_seconds(said: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    progress = RestoreProgress("step 7", 10 * GIB, clock=lambda: now_s)
    for _ in range(64):
        now_s += 0.25
        progress.note_bytes(int((now_s - 100) * GIB / 2))
    assert said.messages == [
        "restoring step 7: 2.5 GiB of 10.0 GiB after 5 s, 512.0 MiB/s",
        "restoring step 7: 5.0 GiB of 10.0 GiB after 10 s, 512.0 MiB/s",
        "restoring step 7: 7.5 GiB of 10.0 GiB after 15 s, 512.0 MiB/s",
    ]


def test_a_quick_restore_has_no_such_line(said: pytest.LogCaptureFixture) -> None:
    times_s = iter([0.0, 1.0, 4.9])
    progress = RestoreProgress("step 7", GIB, clock=lambda: next(times_s))
    progress.note_bytes(1)
    progress.note_bytes(GIB)
    assert said.messages == []


def test_what_comes_before_the_bytes_counts(
    said: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifests of a large checkpoint take seconds to read."""
    state = {"w": torch.zeros(3)}
    with CheckpointManager(tmp_path, 1, chkpt_on_preemption=False) as manager:
        manager.save(1, state)

    def read_slowly(*arguments: Any) -> Any:
        time.sleep(0.4)
        return read_manifest_bytes(*arguments)

    monkeypatch.setattr(loading, "read_manifest_bytes", read_slowly)
    monkeypatch.setattr(progress, "_EVERY_S", 0.35)
    with CheckpointManager(tmp_path, chkpt_on_preemption=False) as manager:
        manager.restore(1, state)
    assert any(line.startswith("restoring step 1: ") for line in said.messages), said.messages
