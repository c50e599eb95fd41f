"""Hooks of a manager's saves, and what they may ask of it."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from stepkeeper import CheckpointManager, SaveReport
from stepkeeper.training import shutdown

UNCLOSED = """
import sys, time, torch
from stepkeeper import CheckpointManager

def told(report):
    time.sleep(0.3)
    print(report.step, report.committed)

manager = CheckpointManager(sys.argv[1], 1)
manager.on_save(told)
for step in (1, 2):
    manager.save_async(step, {"w": torch.zeros(3)})
"""


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return (tmp_path / "root").as_uri()


def test_a_hook_may_ask_the_manager_for_all_that_it_has(uri: str) -> None:
    seen: list[object] = []
    state = {"w": torch.arange(3.0)}
    with CheckpointManager(uri, 1) as manager:

        def look(report: SaveReport) -> None:
            if report.step == 1:
                seen.append(manager.wait(20))
                manager.join()
                manager.verify(1)
                there = {"w": torch.zeros(3)}
                manager.restore(1, there)
                seen.extend((there["w"].tolist(), manager.all_steps(), manager.metadata(1).step))

        manager.on_save(look)
        assert manager.save(1, state)
    assert seen == [True, [0.0, 1.0, 2.0], [1], 1]


def test_a_hook_that_hangs_keeps_no_manager_open(
    uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutdown, "_HOOKS_S", 0.1)
    free = threading.Event()
    with CheckpointManager(uri, 1) as manager:
        manager.on_save(lambda _: free.wait(60))
        for step in (1, 2):
            manager.save(step, {"w": torch.zeros(3)})
    free.set()
    assert "a hook for saves is still running" in caplog.text


def test_hooks_of_the_last_saves_are_called_where_nobody_closes_the_manager(uri: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNCLOSED, uri], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout) == (0, "1 True\n2 True\n"), done.stderr
