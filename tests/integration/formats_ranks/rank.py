"""One of several ranks that load a torch.save file: python rank.py WHAT RANK WORLD_SIZE FOLDER."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from stepkeeper_planners import SPMDLoadPlanner
from stepkeeper_planners.errors import LoadMismatchError, SourceError
from stepkeeper_planners.formats import TorchSaveReader
from stepkeeper_testing.trainer import join

PLACED: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def make_state(filler: int) -> dict[str, Any]:
    """Make the state that the file holds with 7; values too."""
    return {
        "plain": torch.arange(12.0).reshape(3, 4) + filler,
        "scalar": torch.tensor(filler),
        "bytes": (torch.arange(40) + filler).to(torch.uint8).view(torch.float8_e4m3fn),
        "placed": {name: torch.arange(35.0).reshape(5, 7) * filler for name in PLACED},
        "step": filler,
        "seen": [filler, "x"],
    }


def spread(state: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The same with tensors that lie over all ranks."""
    mesh = init_device_mesh("cpu", (world_size,))
    placed = {
        name: distribute_tensor(tensor, mesh, [PLACED[name]]) for name, tensor in state["placed"].items()
    }
    return {**state, "placed": placed}


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def check(got: dict[str, Any], want: dict[str, Any], path: str = "") -> None:
    for name, value in want.items():
        if isinstance(value, dict):
            check(got[name], value, f"{path}{name}.")
        elif isinstance(value, Tensor):
            found = whole(got[name])
            assert found.dtype == value.dtype, path + name
            same = torch.equal(found.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
            assert same, f"{path}{name}: {found} is not {value}"
        else:
            assert got[name] == value, path + name


def load_all(planner: Any, world_size: int, folder: Path) -> None:
    state = spread(make_state(0), world_size)
    load(state, checkpoint_id=folder / "state.pt", storage_reader=TorchSaveReader(), planner=planner)
    check(state, make_state(7))


def refused(folder: Path) -> None:
    """Every rank hears what is wrong, none waits for ever."""
    for name, state, kind in (
        ("missing.pt", make_state(0), FileNotFoundError),
        ("damaged.pt", make_state(0), SourceError),
        ("state.pt", {"plain": torch.zeros(2, 2)}, LoadMismatchError),
    ):
        with pytest.raises(CheckpointException) as raised:
            load(
                state,
                checkpoint_id=folder / name,
                storage_reader=TorchSaveReader(),
                planner=SPMDLoadPlanner(),
            )
        assert {type(reason) for reason, _ in raised.value.failures.values()} == {kind}, name


def main(what: str, rank: int, world_size: int, folder: Path) -> None:
    join(rank, world_size, folder)
    if what == "refused":
        refused(folder)
    else:
        load_all(SPMDLoadPlanner() if what == "ours" else DefaultLoadPlanner(), world_size, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[3], int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4]))
