"""The script of docs/user/state.md goes on bit for bit where it was stopped; test_pages.py runs all blocks."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fork_server import ForkServer
from page_blocks import read_blocks

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
exec(compile(open(sys.argv[3], encoding="utf-8").read(), sys.argv[3], "exec"), {"__name__": "page"})
"""
"""Run the script, and end the process, as by an error, after a step."""

Run = Callable[..., list[list[str]]]
"""run(folder, seed, stop_after=None): what was printed, in words."""


@pytest.fixture
def run(torch_server: ForkServer, tmp_path: Path) -> Run:
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")
    script, *_ = (block for block in read_blocks("docs/user/state.md") if block.language == "python")
    (tmp_path / "script.py").write_text(script.text, encoding="utf-8")

    def run(folder: str, seed: int, *, stop_after: int = -1) -> list[list[str]]:
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [tmp_path / "run.py", seed, stop_after, tmp_path / "script.py"]
        done = torch_server.run(command, cwd=tmp_path / folder, timeout=200)
        assert done.returncode == (0 if stop_after < 0 else 3), done.stderr[-4000:]
        return [line.split() for line in done.stdout.splitlines()]

    return run


@pytest.mark.smoke
def test_it_resumes_bit_for_bit(run: Run) -> None:
    undisturbed = run("undisturbed", 0)
    assert [int(step) for step, _ in undisturbed] == list(range(1, 21))
    assert run("stopped", 0, stop_after=8) == undisturbed[:8]
    # A new process has other random numbers.
    assert run("stopped", 1, stop_after=12) == undisturbed[5:12]
    assert run("stopped", 2) == undisturbed[10:]
