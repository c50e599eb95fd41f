"""One of three ranks, of which the last two are a group: python groups.py RANK WORLD_SIZE FOLDER SCENARIO."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stepkeeper import CheckpointManager
from stepkeeper_planners import PerRank, SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper_planners.errors import UnsupportedShardingError

MEMBERS = [1, 2]


def cut(seed: int, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.arange(5.0) + seed, mesh, [Shard(0)], src_data_rank=None)


def dtensors(rank: int, folder: Path, group: Any) -> None:
    """The mesh is of the group's processes, which have other ranks in the group."""
    mesh, everyone = DeviceMesh("cpu", MEMBERS), DeviceMesh("cpu", [0, *MEMBERS])
    if rank not in MEMBERS:
        return
    save(
        {"t": cut(7, mesh)},
        checkpoint_id=folder / "dcp",
        planner=SPMDSavePlanner(process_group=group),
        process_group=group,
    )
    state = {"t": cut(0, mesh)}
    load(state, checkpoint_id=folder / "dcp", planner=planner_of(group), process_group=group)
    assert torch.equal(state["t"].to_local(), cut(7, mesh).to_local())
    manager = CheckpointManager((folder / "root").as_uri(), 1, process_group=group, chkpt_on_preemption=False)
    with manager:
        manager.save(1, {"t": cut(9, mesh)}, force=True)
        manager.restore(1, state)
    assert torch.equal(state["t"].to_local(), cut(9, mesh).to_local())
    with pytest.raises(CheckpointException) as raised:
        save(
            {"t": cut(7, everyone)},
            checkpoint_id=folder / "no",
            planner=SPMDSavePlanner(process_group=group),
            process_group=group,
        )
    for error, _ in raised.value.failures.values():
        assert isinstance(error, UnsupportedShardingError)
        assert str(error).startswith("t: its part at (0,) lies on rank 0, which isn't in the process group")


def per_rank(rank: int, folder: Path, group: Any) -> None:
    """Check that the group tells which rank is which among those that have a value each."""
    if rank not in MEMBERS:
        return
    planner = SPMDSavePlanner(process_group=group)
    save({"p": PerRank(10 + rank)}, checkpoint_id=folder / "dcp", planner=planner, process_group=group)
    state = {"p": PerRank(-1)}
    load(state, checkpoint_id=folder / "dcp", planner=planner_of(group), process_group=group)
    assert state["p"].value == 10 + rank
    with pytest.raises(CheckpointException, match=r"SPMDLoadPlanner\(process_group=…\)"):
        load(state, checkpoint_id=folder / "dcp", planner=SPMDLoadPlanner(), process_group=group)


def planner_of(group: Any) -> SPMDLoadPlanner:
    return SPMDLoadPlanner(process_group=group)


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = FileStore(str(folder / "ranks"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    group = dist.new_group(MEMBERS)
    {"dtensors": dtensors, "per_rank": per_rank}[sys.argv[4]](rank, folder, group)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
