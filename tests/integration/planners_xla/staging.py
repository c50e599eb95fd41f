"""dcp.async_save from devices while the optimizer goes on, in place. Run in a process of its own, with 4 devices."""

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.runtime as xr
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch_xla.distributed.spmd import Mesh, mark_sharding

from stepkeeper_planners import PerRank, SPMDLoadPlanner, SPMDSavePlanner, SPMDStager


def make_state(fill: float) -> dict[str, Any]:
    mesh = Mesh(np.arange(4), (2, 2), ("x", "y"))
    device = torch_xla.device()
    tiled = torch.full((8, 6), fill).to(device)
    partly = torch.full((256, 256), fill + 1).to(device)
    everywhere = torch.full((3,), fill + 2).to(device)
    mark_sharding(tiled, mesh, ("x", "y"))
    mark_sharding(partly, mesh, ("x", None))
    torch_xla.sync()
    host = torch.full((4,), fill + 3)
    model = {"tiled": tiled, "tied": tiled, "partly": partly, "everywhere": everywhere}
    return {"model": model, "host": host, "history": [1, 2, int(fill)], "rng": PerRank({"at": int(fill)})}


def step(state: dict[str, Any]) -> None:
    for name in ("tiled", "partly", "everywhere"):
        state["model"][name].mul_(3)
    torch_xla.sync()
    state["host"].mul_(3)
    state["history"].append(99)
    state["rng"].value["at"] = -1


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    state = make_state(5)
    saving = async_save(
        state,
        checkpoint_id=folder / "saved",
        planner=SPMDSavePlanner(),
        async_stager=SPMDStager(),
        no_dist=True,
    )
    step(state)
    assert not isinstance(saving, AsyncSaveResponse)
    saving.result()
    loaded = make_state(0)
    load(loaded, checkpoint_id=folder / "saved", planner=SPMDLoadPlanner(), no_dist=True)
    wanted = make_state(5)
    for name, tensor in wanted["model"].items():
        assert torch.equal(loaded["model"][name].cpu(), tensor.cpu()), name
    assert torch.equal(loaded["host"], wanted["host"])
    assert loaded["history"] == wanted["history"]
    assert loaded["rng"].value == {"at": 5}


if __name__ == "__main__":
    xr.use_spmd()
    main(Path(sys.argv[1]))
