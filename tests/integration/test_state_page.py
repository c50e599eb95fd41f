"""The Python blocks of docs/user/state.md, as they stand there, one after the other, as somebody would try them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer

from stepkeeper import CheckpointManager

PAGE = (Path(__file__).parents[2] / "docs" / "user" / "state.md").read_text(encoding="utf-8")

RUN = """
import random, sys
import torch
from stepkeeper import CheckpointManager

seed, stop_after = int(sys.argv[1]), int(sys.argv[2])
random.seed(seed)
torch.manual_seed(seed)
given = CheckpointManager.step


def step(manager, number, *arguments):
    outcome = given(manager, number, *arguments)
    if number == stop_after:
        raise SystemExit(3)
    return outcome


CheckpointManager.step = step
page = {"__name__": "page"}
for path in sys.argv[3:]:
    exec(compile(open(path, encoding="utf-8").read(), path, "exec"), page)
"""
"""Run blocks in one namespace, and end the process, as by an error, after a step."""

Run = Callable[..., list[list[str]]]
"""run(folder, seed, blocks, stop_after=None): what was printed, in words."""


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def run(torch_server: ForkServer, tmp_path: Path) -> Run:
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")

    def run(folder: str, seed: int, blocks: list[str], *, stop_after: int = -1) -> list[list[str]]:
        (tmp_path / folder).mkdir(exist_ok=True)
        paths = []
        for number, block in enumerate(blocks):
            paths.append(tmp_path / f"block-{number}.py")
            paths[-1].write_text(block, encoding="utf-8")
        command = [tmp_path / "run.py", seed, stop_after, *paths]
        done = torch_server.run(command, cwd=tmp_path / folder, timeout=200)
        assert done.returncode == (0 if stop_after < 0 else 3), done.stderr[-4000:]
        return [line.split() for line in done.stdout.splitlines()]

    return run


def test_the_first_block_resumes_bit_for_bit(blocks: list[str], run: Run) -> None:
    undisturbed = run("undisturbed", 0, blocks[:1])
    assert [int(step) for step, _ in undisturbed] == list(range(1, 21))
    assert run("stopped", 0, blocks[:1], stop_after=8) == undisturbed[:8]
    # A new process has other random numbers.
    assert run("stopped", 1, blocks[:1], stop_after=12) == undisturbed[5:12]
    assert run("stopped", 2, blocks[:1]) == undisturbed[10:]


def test_all_blocks_run_in_their_order(blocks: list[str], run: Run, tmp_path: Path) -> None:
    assert len(blocks) == 6
    run("all", 0, blocks)
    found: dict[str, Any] = {"tokens": 0}
    with CheckpointManager(tmp_path / "all" / "checkpoints", chkpt_on_preemption=False) as manager:
        assert manager.all_steps() == [5, 10, 15, 20, 25, 30]
        manager.restore(30, found, items=["tokens"])
    assert found == {"tokens": 40960}
