"""One of several ranks: saves with one world size, or loads what another one saved."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner


def make_state(offset: int) -> dict[str, Any]:
    """Make the state of a replicated model: alike on every rank."""
    layers = {f"layer{i}": (torch.arange(2000.0) + i + offset).reshape(40, 50) for i in range(12)}
    return {
        "model": layers,
        "scalar": torch.tensor(1 + offset),
        "empty": torch.empty(0),
        "step": offset,
        "lr": [0.1],
    }


def main(action: str, rank: int, world_size: int, folder: Path) -> None:
    store = FileStore(str(folder / f"store-{action}-{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    checkpoint = folder / "checkpoint"
    if action == "save":
        save(make_state(7), storage_writer=FileSystemWriter(checkpoint), planner=SPMDSavePlanner())
    else:
        state, want = make_state(0), make_state(7)
        planner = None if action == "load-stock" else SPMDLoadPlanner()
        load(state, storage_reader=FileSystemReader(checkpoint), planner=planner)
        for name, tensor in want["model"].items():
            assert torch.equal(state["model"][name], tensor), name
        assert torch.equal(state["scalar"], want["scalar"])
        assert state["step"] == 7
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[3], int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4]))
