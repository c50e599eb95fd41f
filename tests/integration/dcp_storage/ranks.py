"""One of several ranks: saves and loads DTensors with stepkeeper.dcp and with torch's own."""

import sys
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from stepkeeper import PerRank, SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper.dcp import Stager, StorageReader, StorageWriter
from stepkeeper_testing.damage import flip


def full(fill: float) -> torch.Tensor:
    return torch.arange(300 * 70, dtype=torch.float32).reshape(300, 70) + fill


def make_state(mesh: DeviceMesh, fill: float, placement: Placement) -> dict[str, Any]:
    uneven = torch.arange(7.0) + fill
    return {
        "model": {
            "w": distribute_tensor(full(fill), mesh, [placement]),
            "uneven": distribute_tensor(uneven, mesh, [Shard(0)]),
            "whole": distribute_tensor(uneven, mesh, [Replicate()]),
        },
        "plain": torch.full((5,), fill),
        "step": int(fill),
    }


def check(state: dict[str, Any], fill: float) -> None:
    for name, wanted in (("w", full(fill)), ("uneven", torch.arange(7.0) + fill)):
        found = state["model"][name]
        assert isinstance(found, DTensor)
        assert torch.equal(found.full_tensor(), wanted), name
    assert torch.equal(state["model"]["whole"].to_local(), torch.arange(7.0) + fill)
    assert torch.equal(state["plain"], torch.full((5,), fill))
    assert state["step"] == int(fill)


def every_pair(folder: Path, mesh: DeviceMesh) -> None:
    """Stock and our planners, stock and our storage, and another sharding."""
    for number, planner in enumerate((SPMDSavePlanner, None)):
        for writer in (StorageWriter, FileSystemWriter):
            there = folder / f"{number}{writer.__name__}"
            saver = planner() if planner else None
            save(make_state(mesh, 5.0, Shard(0)), storage_writer=writer(there), planner=saver)
            reader = FileSystemReader(there) if writer is StorageWriter else StorageReader(there)
            found = make_state(mesh, 0.0, Shard(1))
            load(found, storage_reader=reader)
            check(found, 5.0)
            found = make_state(mesh, 0.0, Shard(0))
            load(found, storage_reader=StorageReader(there), planner=SPMDLoadPlanner())
            check(found, 5.0)


def in_the_background(folder: Path, mesh: DeviceMesh) -> None:
    stager = Stager()
    for fill, planner in ((1.0, None), (2.0, SPMDSavePlanner())):
        state = make_state(mesh, fill, Shard(0))
        saving = async_save(
            state,
            checkpoint_id=folder / str(fill),
            storage_writer=StorageWriter(),
            async_stager=stager,
            planner=planner,
        )
        for tensor in (*state["model"].values(), state["plain"]):
            tensor.zero_()
        assert isinstance(saving, Future)
        saving.result()
        found = make_state(mesh, 0.0, Shard(1))
        load(found, storage_reader=StorageReader(folder / str(fill)))
        check(found, fill)


def failing(folder: Path, mesh: DeviceMesh) -> None:
    """All ranks hear what one has met; the earlier checkpoint is whole."""
    there = folder / "failing"
    save({"own": PerRank(dist.get_rank())}, storage_writer=StorageWriter(there), planner=SPMDSavePlanner())
    for name in sorted(there.glob("__1_*.distcp")):
        if dist.get_rank() == 0:
            flip(name)
    dist.barrier()
    own = PerRank(-1)
    with pytest.raises(CheckpointException, match=r"__1_0\.distcp is not what was written"):
        load({"own": own}, storage_reader=StorageReader(there), planner=SPMDLoadPlanner())
    with pytest.raises(CheckpointException, match="isn't there"):
        load({"own": own}, storage_reader=StorageReader(folder / "nothing"), planner=SPMDLoadPlanner())
    with pytest.raises(CheckpointException, match="overwrite=False"):
        save({"n": 1}, storage_writer=StorageWriter(there, overwrite=False))


def main(rank: int, world_size: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=FileStore(str(folder / "store"), world_size), rank=rank, world_size=world_size
    )
    mesh = init_device_mesh("cpu", (world_size,))
    for action in (every_pair, in_the_background, failing):
        action(folder, mesh)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
