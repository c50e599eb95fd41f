"""A tensor under several names: read once where it was stored once, and held against itself where it was not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper_planners.errors import LoadMismatchError


def load(state: dict[str, Any], folder: Path, **rules: Any) -> SPMDLoadPlanner:
    planner = SPMDLoadPlanner(**rules)
    dcp_load(state, checkpoint_id=folder, planner=planner, no_dist=True)
    return planner


def tied(**others: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    tensor = torch.zeros(4)
    return tensor, {"embed": tensor, "head": tensor, **others}


def test_equal_elements_stored_twice_are_one_tensors(tmp_path: Path) -> None:
    shared = torch.tensor([1.0, float("nan"), -0.0, 3.0])
    dcp_save({"embed": shared, "head": shared.clone()}, checkpoint_id=tmp_path, no_dist=True)
    tensor, state = tied()
    planner = load(state, tmp_path)
    assert torch.equal(tensor.view(torch.int32), shared.view(torch.int32))
    # Nothing else tells that they are equal.
    assert len(planner._pending.items) == 2


@pytest.fixture(name="untied")
def _untied(tmp_path: Path) -> Path:
    state = {"embed": torch.arange(4.0), "head": torch.arange(4.0) * 2, "step": 7}
    dcp_save(state, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def test_different_elements_are_an_error_that_names_both(untied: Path) -> None:
    _, state = tied(step=1)
    with pytest.raises(CheckpointException) as caught:
        load(state, untied)
    ((error, _trace),) = caught.value.failures.values()
    assert isinstance(error, LoadMismatchError)
    assert set(error.mismatched) == {"head"}
    assert "embed and head are one tensor in the state, and have different elements" in str(error)
    assert "exclude=('head',) loads the elements of embed" in str(error)
    assert state["step"] == 1


def test_in_a_load_of_what_both_have_they_are_a_warning(untied: Path) -> None:
    tensor, state = tied(step=1)
    with pytest.warns(UserWarning, match="embed and head are one tensor .* those of embed were loaded"):
        load(state, untied, strict=False)
    assert torch.equal(tensor, torch.arange(4.0))
    assert state["step"] == 7


@pytest.mark.parametrize(("excluded", "factor"), [("head", 1), ("embed", 2)])
def test_one_of_the_names_is_chosen(untied: Path, excluded: str, factor: int) -> None:
    tensor, state = tied(step=1)
    planner = load(state, untied, exclude=[excluded])
    assert torch.equal(tensor, torch.arange(4.0) * factor)
    assert len(planner._pending.items) == 2
    assert state["step"] == 7


def test_elements_that_are_equal_once_they_are_converted_are_equal(tmp_path: Path) -> None:
    wide = torch.arange(1.0, 5.0, dtype=torch.float64)
    dcp_save({"embed": wide, "head": wide + 1e-12}, checkpoint_id=tmp_path / "wide", no_dist=True)
    tensor, state = tied()
    load(state, tmp_path / "wide", cast=True)
    assert torch.equal(tensor, torch.arange(1.0, 5.0))


def test_parts_are_compared_whatever_they_were_cut_in(tmp_path: Path) -> None:
    def in_parts(tensor: Any, ends: tuple[int, ...]) -> torch.Tensor:
        starts = (0, *ends[:-1])
        tensor.global_shape, tensor.local_sizes = (
            (100,),
            tuple((b - a,) for a, b in zip(starts, ends, strict=True)),
        )
        tensor.global_offsets = tensor.local_offsets = tuple((start,) for start in starts)
        return tensor  # type: ignore[no-any-return]  # torch.Tensor takes any attribute

    for name, head in {
        "equal": torch.arange(100.0),
        "other": torch.arange(100.0).index_fill(0, torch.tensor(77), 0),
    }.items():
        stored = {"embed": in_parts(torch.arange(100.0), (30, 100)), "head": in_parts(head, (50, 80, 100))}
        dcp_save(stored, checkpoint_id=tmp_path / name, planner=SPMDSavePlanner(), no_dist=True)
    tensor = in_parts(torch.zeros(100), (10, 60, 100))
    load({"embed": tensor, "head": tensor}, tmp_path / "equal")
    assert torch.equal(tensor, torch.arange(100.0))
    with pytest.raises(CheckpointException, match="embed and head are one tensor"):
        load({"embed": tensor, "head": tensor}, tmp_path / "other")
