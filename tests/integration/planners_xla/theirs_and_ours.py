"""Read with our planner what torch_xla's wrote, and the other way round, onto other shardings."""

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.distributed_checkpoint as torch_xla_checkpoint
import torch_xla.runtime as xr
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner


def make_state(seed: int, mesh_shape: tuple[int, ...], *specs: tuple[Any, ...]) -> dict[str, Any]:
    """Sharded over all devices, for theirs lose what is partially replicated; dicts with and without tensors."""
    mesh = xs.Mesh(np.arange(4), mesh_shape)
    matrix = (torch.arange(70.0).reshape(7, 10) + seed).to("xla")
    vector = (torch.arange(9.0) + seed).to("xla")
    for tensor, spec in zip((matrix, vector), specs, strict=True):
        xs.mark_sharding(tensor, mesh, spec)
    return {
        "model": {"matrix": matrix, "vector": vector, "plain": torch.full((3,), float(seed))},
        "schedule": {"last": {"epoch": seed}, "rates": [0.1 * seed, 2]},
        "groups": [{"lr": 0.5 * seed, "params": [0, 1]}],
        "empty": {},
        "step": seed,
    }


def assert_loaded(state: dict[str, Any], seed: int) -> None:
    want = {"matrix": torch.arange(70.0).reshape(7, 10) + seed, "vector": torch.arange(9.0) + seed}
    for name, tensor in want.items():
        assert torch.equal(state["model"][name].cpu(), tensor), name
    assert torch.equal(state["model"]["plain"], torch.full((3,), float(seed)))
    assert state["schedule"] == {"last": {"epoch": seed}, "rates": [0.1 * seed, 2]}
    assert state["groups"] == [{"lr": 0.5 * seed, "params": [0, 1]}]
    assert (state["empty"], state["step"]) == ({}, seed)


def main(folder: Path) -> None:
    rows, grid = ((4,), (0, None), (0,)), ((2, 2), (1, 0), ((0, 1),))
    theirs: dict[str, Any] = {}
    for number, (saved, loaded) in enumerate(((rows, grid), (grid, rows))):
        place = folder / f"theirs-{number}"
        planner = torch_xla_checkpoint.SPMDSavePlanner()
        save(make_state(7, *saved), storage_writer=FileSystemWriter(place), planner=planner)
        state = make_state(1, *loaded)
        load(state, storage_reader=FileSystemReader(place), planner=SPMDLoadPlanner())
        assert_loaded(state, 7)
        theirs[str(place)] = FileSystemReader(place).read_metadata().state_dict_metadata
    assert all("schedule" in names and "empty" in names for names in theirs.values())
    place = folder / "ours"
    save(make_state(7, *grid), storage_writer=FileSystemWriter(place), planner=SPMDSavePlanner())
    # Theirs finds no value that ours, as torch, stores under a name of its own.
    tensors = {"model": make_state(1, *rows)["model"], "step": 1}
    load(tensors, storage_reader=FileSystemReader(place), planner=torch_xla_checkpoint.SPMDLoadPlanner())
    assert torch.equal(tensors["model"]["matrix"].cpu(), torch.arange(70.0).reshape(7, 10) + 7)
    assert tensors["step"] == 7
    torch_xla.sync()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    xr.use_spmd()
    main(Path(sys.argv[1]))
