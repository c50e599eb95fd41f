"""A part of a commit is loaded on request, and a commit is verified without being loaded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepkeeper import CheckpointManager
from stepkeeper.errors import TornCheckpointError
from stepkeeper.log import CommitRecord, Log
from stepkeeper.storage import open_store
from stepkeeper_planners.errors import LoadMismatchError


@pytest.fixture(name="manager")
def _manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager((tmp_path / "root").as_uri(), 1, chkpt_on_preemption=False) as manager:
        manager.save(1, {"model": {"w": torch.arange(6.0), "b": torch.ones(2)}, "optim": {"lr": 0.5}, "n": 7})
        yield manager


def head(folder: Path) -> CommitRecord:
    found = Log(open_store((folder / "root").as_uri())).open().latest
    assert found is not None
    return found


def zeros(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "model": {"w": torch.zeros(6, dtype=dtype), "b": torch.zeros(2, dtype=dtype)},
        "optim": {"lr": 0.0},
        "n": 0,
    }


def test_items_are_loaded_and_nothing_else(manager: CheckpointManager, tmp_path: Path) -> None:
    state = zeros()
    assert manager.restore_latest(state, items=["model"], exclude=["model.b"]) is not None
    assert torch.equal(state["model"]["w"], torch.arange(6.0))
    assert (state["model"]["b"].sum(), state["optim"], state["n"]) == (0, {"lr": 0.0}, 0)
    assert not head(tmp_path).verified, "a part says nothing about the rest"
    assert manager.restore_latest(state) is not None
    assert (state["model"]["b"].sum(), state["optim"], state["n"]) == (2, {"lr": 0.5}, 7)
    assert head(tmp_path).verified


def test_what_only_one_side_has_is_left_when_that_is_asked_for(manager: CheckpointManager) -> None:
    state = {"n": 0, "new": torch.zeros(3)}
    with pytest.raises(LoadMismatchError, match="strict=False"):
        manager.restore(1, state)
    manager.restore(1, state, strict=False)
    assert state["n"] == 7


def test_elements_are_converted_when_that_is_asked_for(manager: CheckpointManager) -> None:
    state = zeros(torch.bfloat16)
    with pytest.raises(LoadMismatchError, match="cast=True"):
        manager.restore(1, state)
    assert state["model"]["w"].sum() == 0
    manager.restore(1, state, cast=True)
    assert torch.equal(state["model"]["w"], torch.arange(6.0, dtype=torch.bfloat16))


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.0.json"])
def test_a_verification_reads_every_object_and_condemns_none(
    manager: CheckpointManager, tmp_path: Path, name: str
) -> None:
    found = manager.verify(1)
    folder = tmp_path / "root" / head(tmp_path).folder
    there = [path.stat().st_size for path in folder.iterdir()]
    assert (found.step, found.n_objects, found.size_bytes) == (1, len(there), sum(there))
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(TornCheckpointError, match=name.replace(".", r"\.")):
        manager.verify(1)
    assert manager.all_steps() == [1]
