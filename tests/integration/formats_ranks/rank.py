"""One of several ranks that load a torch.save file: python rank.py WHAT RANK WORLD_SIZE FOLDER."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from stepkeeper_planners import SPMDLoadPlanner
from stepkeeper_planners.errors import LoadMismatchError, SourceError
from stepkeeper_planners.formats import TorchSaveReader
from stepkeeper_testing.trainer import join

PLACED: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}


def make_model(filler: int) -> nn.Module:
    torch.manual_seed(filler)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def make_state(filler: int) -> dict[str, Any]:
    """Make the state that the file holds with 7; values too."""
    return {
        "plain": torch.arange(12.0).reshape(3, 4) + filler,
        "scalar": torch.tensor(filler),
        "bytes": (torch.arange(40) + filler).to(torch.uint8).view(torch.float8_e4m3fn),
        "placed": {name: torch.arange(35.0).reshape(5, 7) * filler for name in PLACED},
        "model": dict(make_model(filler).state_dict()),
        "step": filler,
        "seen": [filler, "x"],
    }


def spread(state: dict[str, Any], world_size: int) -> dict[str, Any]:
    """The same with tensors that lie over all ranks."""
    mesh = init_device_mesh("cpu", (world_size,))
    placed = {
        name: distribute_tensor(tensor, mesh, [PLACED[name]]) for name, tensor in state["placed"].items()
    }
    model = make_model(0)
    fully_shard(model, mesh=mesh)
    return {**state, "placed": placed, "model": get_model_state_dict(model)}


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
    sparse = {"plain": torch.eye(3, 4).to_sparse(), "scalar": torch.tensor(7)}
    meta = {"plain": torch.empty(3, 4, device="meta"), "scalar": torch.tensor(7)}
    if dist.get_rank() == 0:
        torch.save(sparse, folder / "sparse.pt")
        torch.save(meta, folder / "meta.pt")
    for name, kind in (
        ("missing.pt", FileNotFoundError),
        ("damaged.pt", SourceError),
        ("sparse.pt", SourceError),
        ("meta.pt", SourceError),
    ):
        reasons = reasons_of(make_state(0), folder / name)
        assert {type(reason) for reason in reasons} == {kind}, reasons
    reasons = reasons_of({"plain": torch.zeros(2, 2)}, folder / "state.pt")
    assert {type(reason) for reason in reasons} == {LoadMismatchError}, reasons


def reasons_of(state: dict[str, Any], path: Path) -> list[BaseException]:
    try:
        load(state, checkpoint_id=path, storage_reader=TorchSaveReader(), planner=SPMDLoadPlanner())
    except CheckpointException as error:
        return [reason for reason, _ in error.failures.values()]
    raise AssertionError(f"{path} was loaded")


def main(what: str, rank: int, world_size: int, folder: Path) -> None:
    join(rank, world_size, folder)
    if what == "ours":
        load_all(SPMDLoadPlanner(), world_size, folder)
    elif what == "stock-planner":
        load_all(DefaultLoadPlanner(), world_size, folder)
    elif what == "refused":
        refused(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[3], int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4]))
