"""The command, as processes, beside a companion that saves, deletes and collects in the same folder."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from stepkeeper.log import Log
from stepkeeper.storage import open_store
from stepkeeper_testing.checkpoints import SmallRoot
from stepkeeper_testing.trainer import open_manager

COMMAND = [str(Path(sys.executable).with_name("stepkeeper"))]
N_ROUNDS = 2


@contextmanager
def saving(url: str) -> Iterator[list[int]]:
    """A job saves as long as the block lasts: the steps that it has saved. What fails ends it, and is raised here."""
    steps: list[int] = []
    is_over = threading.Event()

    def run() -> None:
        with open_manager(url, keep=2, take_over=True) as manager:
            manager.restore({"blob": torch.zeros(1 << 18)})
            while not is_over.is_set():
                manager.save(len(steps) + 1, {"blob": torch.randn(1 << 18)}).result()
                steps.append(len(steps) + 1)

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run)
        try:
            while not steps and not job.done():
                time.sleep(0.01)
            yield steps
        finally:
            is_over.set()
            job.result(60)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.smoke
def test_nothing_but_rm_is_noticed_by_a_job_that_is_saving(tmp_path: Path) -> None:
    url = tmp_path.as_uri()
    before = SmallRoot(url)
    before.begin()
    left = before.give_up(7)
    with saving(url) as steps:
        claim = Log(open_store(url)).open().claim
        for _ in range(N_ROUNDS):
            n_steps = len(steps)
            for command in (["ls", "--all"], ["verify", "--all"], ["gc"], ["doctor"]):
                done = run(*command, url)
                assert (done.returncode, done.stderr) == (0, ""), done
            assert len(steps) > n_steps
        refused = run("rm", url, str(steps[0]), "--yes")
        assert refused.returncode in (1, 4), refused
    state = Log(open_store(url)).open()
    assert [record.step for record in state.line] == [steps[-1], steps[-1] - 1]
    assert state.claim == claim
    assert not (tmp_path / left).exists()
    assert run("verify", "--all", url).returncode == 0
