"""Saves that come from several threads of one process."""

import logging
import threading
from pathlib import Path

import pytest
import torch

from stepkeeper import CheckpointManager
from stepkeeper.save.report import SaveReport

N_THREADS, N_SAVES = 4, 10


@pytest.mark.parametrize("waits", [True, False])
def test_each_is_made_and_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, waits: bool) -> None:
    manager = CheckpointManager(tmp_path / "root", 1, chkpt_on_preemption=False)
    reports: list[SaveReport] = []
    manager.on_save(reports.append)
    failures: list[BaseException] = []

    def save(thread: int) -> None:
        begin = manager.save if waits else manager.save_async
        try:
            for number in range(N_SAVES):
                step = 100 * thread + number
                assert begin(step, {"w": torch.full((1000,), float(step))}, True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    manager.join()
    steps = sorted(100 * thread + number for thread in range(N_THREADS) for number in range(N_SAVES))
    assert (failures, sorted(manager.all_steps())) == ([], steps)
    state = {"w": torch.zeros(1000)}
    for step in (steps[0], steps[-1]):
        manager.restore(step, state)
        assert torch.equal(state["w"], torch.full((1000,), float(step)))
    manager.close()
    assert sorted(report.step for report in reports) == steps
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []
