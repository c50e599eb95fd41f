"""Several ranks whose training ends at a step that wasn't due: all of them save it, or none, and none waits in vain."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer

from stepkeeper import CheckpointManager
from stepkeeper.contract import ExitCode

RANK = Path(__file__).parent / "manager_trainer" / "ending.py"
N_RANKS = 3


def run(servers: tuple[ForkServer, ForkServer], folder: Path, case: str) -> tuple[list[int], list[str]]:
    """Run all ranks: their exit codes, and what each wrote."""
    ranks = [
        servers[rank % 2].start(
            [RANK, rank, N_RANKS, folder, case], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(N_RANKS)
    ]
    try:
        said = [process.communicate(timeout=150)[0] for process in ranks]
        return [process.wait() for process in ranks], said
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def saved(folder: Path) -> list[int]:
    with CheckpointManager(folder / "root", chkpt_on_preemption=False) as manager:
        return manager.all_steps()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("case", "code"),
    [
        *((case, ExitCode.DONE) for case in ("plain", "total", "notice")),
        # One rank has heard of the notice, and the programs of all end themselves for it.
        ("told", ExitCode.SAVED),
    ],
)
def test_all_ranks_save_the_last_step(
    torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path, case: str, code: ExitCode
) -> None:
    codes, said = run(torch_servers, tmp_path, case)
    assert codes == [code] * N_RANKS, said
    assert saved(tmp_path) == [5, 7]
    state: dict[str, Any] = {"w": torch.zeros(100), "step": 0}
    with CheckpointManager(tmp_path / "root", chkpt_on_preemption=False) as manager:
        manager.restore(7, state)
    assert (state["step"], state["w"].tolist()) == (7, [7.0] * 100)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("uneven", "the ranks don't end at the same one (unsaved: 6, 7)"),
        ("changed", "step 7, the last one, isn't saved: the state has changed since"),
    ],
)
def test_no_rank_saves_what_one_rank_has_not(
    torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path, case: str, told: str
) -> None:
    codes, said = run(torch_servers, tmp_path, case)
    assert codes == [ExitCode.DONE] * N_RANKS, said
    assert saved(tmp_path) == [5]
    assert [told in each for each in said] == [True, False, False]


def test_no_rank_saves_under_another_claim(
    torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path
) -> None:
    codes, said = run(torch_servers, tmp_path, "fenced")
    assert codes == [ExitCode.FENCED] * N_RANKS, said
    assert saved(tmp_path) == [5]


def test_no_rank_saves_where_one_fails(torch_servers: tuple[ForkServer, ForkServer], tmp_path: Path) -> None:
    codes, said = run(torch_servers, tmp_path, "fails")
    assert codes[1] == 1, said
    assert ExitCode.DONE not in codes, said
    assert saved(tmp_path) == [5]
