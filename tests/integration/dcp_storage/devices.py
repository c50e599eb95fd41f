"""dcp.async_save from devices through stepkeeper.dcp, while the state changes. Run in a process with 4 devices."""

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

from stepkeeper import SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper.dcp import Stager, StorageReader, StorageWriter


def make_state(fill: float) -> dict[str, Any]:
    mesh = Mesh(np.arange(4), (2, 2), ("x", "y"))
    device = torch_xla.device()
    tiled = torch.full((8, 6), fill).to(device)
    everywhere = torch.full((3,), fill + 2).to(device)
    mark_sharding(tiled, mesh, ("x", "y"))
    torch_xla.sync()
    return {
        "model": {"tiled": tiled, "tied": tiled, "everywhere": everywhere},
        "host": torch.full((4,), fill + 3),
    }


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    stager = Stager()
    for fill in (5.0, 6.0):
        state = make_state(fill)
        saving = async_save(
            state,
            storage_writer=StorageWriter(folder / str(fill)),
            planner=SPMDSavePlanner(),
            async_stager=stager,
            no_dist=True,
        )
        for tensor in (state["model"]["tiled"], state["model"]["everywhere"], state["host"]):
            tensor.mul_(3)
        torch_xla.sync()
        assert not isinstance(saving, AsyncSaveResponse)
        saving.result()
        loaded = make_state(0.0)
        load(
            loaded, storage_reader=StorageReader(folder / str(fill)), planner=SPMDLoadPlanner(), no_dist=True
        )
        wanted = make_state(fill)
        for name, tensor in wanted["model"].items():
            assert torch.equal(loaded["model"][name].cpu(), tensor.cpu()), name
        assert torch.equal(loaded["host"], wanted["host"])


if __name__ == "__main__":
    xr.use_spmd()
    main(Path(sys.argv[1]))
