"""What stock torch of each release since 2.9 saved is read by the torch of this environment, by each of our readers."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planners_parts.release_state import check_same, make_state, make_whole_state
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader as AnyReader

from stepkeeper.dcp import StorageReader
from stepkeeper_planners import SafeFileSystemReader, SPMDLoadPlanner
from stepkeeper_planners.formats import torch_save_to_checkpoint
from stepkeeper_testing.trainer import open_manager

DATA = Path(__file__).parents[1] / "data" / "torch_releases"
RELEASES = ["2.9.0", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
ACROSS = Path(__file__).parent / "torch_releases" / "across.py"
TREE = Path(__file__).parents[2]
ENVIRONMENTS = [TREE / folder / "bin" / "python" for folder in (".venv", ".venv-newest")]
"""The interpreters that `make setup` and `make test-newest` make, with different torches."""

READERS: list[tuple[type[AnyReader], type[LoadPlanner] | None]] = [
    (SafeFileSystemReader, None),
    (SafeFileSystemReader, SPMDLoadPlanner),
    (StorageReader, None),
    (StorageReader, SPMDLoadPlanner),
]


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    """Give back the state with memory of its own for each tensor, without what was in them."""
    tensors = {
        name: torch.empty(value.shape, dtype=value.dtype)
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    nested = {name: emptied(value) for name, value in state.items() if isinstance(value, dict)}
    return state | tensors | nested


@pytest.mark.smoke
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("reader", "planner"), READERS)
def test_dcp_load_by_our_readers(
    release: str, reader: Callable[[Path], AnyReader], planner: Callable[[], LoadPlanner] | None
) -> None:
    for kind, make in (("one", make_state), ("two", make_whole_state)):
        state = emptied(make(100))
        read = reader(DATA / release / kind / "step_7")
        load(state, storage_reader=read, planner=planner() if planner else None, no_dist=True)
        check_same(state, make())


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("kind", "make"), [("one", make_state), ("two", make_whole_state)])
def test_a_manager_goes_on_from_it(
    release: str, kind: str, make: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(DATA / release / kind, tmp_path / "root"))
    state = emptied(make(100))
    with open_manager(root.as_uri()) as manager:
        restored = manager.restore(state)
        assert restored is not None
        assert restored.step == 7
        check_same(state, make())
        manager.save(8, make(1)).result()
        manager.restore(state, 8)
    check_same(state, make(1))


@pytest.mark.parametrize("release", RELEASES)
def test_its_torch_save_file_becomes_a_checkpoint(release: str, tmp_path: Path) -> None:
    torch_save_to_checkpoint(DATA / release / "state.pt", tmp_path / "checkpoint")
    state = emptied(make_state(100))
    load(state, storage_reader=SafeFileSystemReader(tmp_path / "checkpoint"), no_dist=True)
    check_same(state, make_state())


@pytest.mark.skipif(not all(each.exists() for each in ENVIRONMENTS), reason="needs both environments")
@pytest.mark.parametrize(("writer", "reader"), [ENVIRONMENTS, ENVIRONMENTS[::-1]], ids=["older", "newer"])
def test_what_one_environment_saved_the_other_loads(writer: Path, reader: Path, tmp_path: Path) -> None:
    """By stock `dcp.load` too: of what our manager and our writer saved, on any torch, any torch's loads all."""
    here = {"PYTHONPATH": os.pathsep.join(str(TREE / part) for part in ("runtime", "planners", "operator"))}
    torches = []
    for python, action in ((writer, "save"), (reader, "load")):
        done = subprocess.run(
            [python, ACROSS, action, tmp_path],
            check=False,
            env={**os.environ, **here},
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        torches.append(done.stdout)
    assert len(set(torches)) == 2, torches
