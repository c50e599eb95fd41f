"""torch_xla's `save` and `join`, and `close`, return when what follows the commits is done: nothing is written then."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stepkeeper.torch_xla as xc

TRAINERS = Path(__file__).parent / "manager_trainer"
N_GARBAGE = 4000
"""As many objects take a file system a moment to delete, so that who doesn't wait for that is seen not to."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def open_manager(root: Path, keep: int = 0) -> xc.CheckpointManager:
    return xc.CheckpointManager(root, 10, keep, chkpt_on_preemption=False)


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(step))}


def leave_garbage(root: Path, n_objects: int = N_GARBAGE) -> Path:
    """Leave what a killed start leaves: a claim, and a folder that no commit names."""
    with open_manager(root) as manager:
        manager.save(10, state_of(10))
    folder = root / "20" / f"0-{secrets.token_hex(16)}"
    folder.mkdir(parents=True)
    for number in range(n_objects):
        (folder / f"__0_{number}.distcp").write_bytes(b"x")
    return folder


def data_of(root: Path) -> list[int]:
    return sorted(int(path.parts[-3]) for path in root.glob("*/*/.metadata"))


@pytest.mark.smoke
def test_save_returns_when_what_it_makes_superfluous_is_gone(root: Path) -> None:
    with open_manager(root, 2) as manager:
        for step, kept in ((10, [10]), (20, [10, 20]), (30, [20, 30]), (10, [10, 30])):
            assert manager.save(step, state_of(step))
            assert (sorted(manager.all_steps()), data_of(root)) == (kept, kept)
    # The order of saves, not of steps, outlives the process.
    with open_manager(root, 2) as manager:
        assert manager.save(20, state_of(20))
        assert (sorted(manager.all_steps()), data_of(root)) == ([10, 20], [10, 20])


@pytest.mark.parametrize("end", ["join", "close"])
def test_it_returns_when_what_the_saves_make_superfluous_is_gone(root: Path, end: str) -> None:
    garbage = leave_garbage(root)
    manager = open_manager(root, 2)
    for step in range(20, 60, 10):
        assert manager.save_async(step, state_of(step))
    getattr(manager, end)()
    assert not garbage.exists()
    assert (open_manager(root).all_steps(), data_of(root)) == ([40, 50], [40, 50])
    manager.close()


def test_all_ranks_see_it_when_save_and_join_return(launch: Callable[..., None], tmp_path: Path) -> None:
    launch(TRAINERS / "ranks.py", 2, tmp_path, "evict")
