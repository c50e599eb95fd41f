"""One of three ranks, with a group of the last two: python groups.py RANK 3 FOLDER."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stepkeeper import CheckpointManager, Options
from stepkeeper_planners import PerRank, SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_testing.trainer import join

MEMBERS = [1, 2]


def cut(seed: int, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.arange(5.0) + seed, mesh, [Shard(0)], src_data_rank=None)


def in_a_group(rank: int, folder: Path, group: Any) -> None:
    """The mesh is of the group's processes, which have other ranks in the group; it tells whose value is whose."""
    mesh, everyone = DeviceMesh("cpu", MEMBERS), DeviceMesh("cpu", [0, *MEMBERS])
    if rank not in MEMBERS:
        return
    planner = SPMDSavePlanner(process_group=group)
    saved: dict[str, Any] = {"t": cut(7, mesh), "p": PerRank(10 + rank)}
    save(saved, checkpoint_id=folder / "dcp", planner=planner, process_group=group)
    state: dict[str, Any] = {"t": cut(0, mesh), "p": PerRank(-1)}
    load(
        state,
        checkpoint_id=folder / "dcp",
        planner=SPMDLoadPlanner(process_group=group),
        process_group=group,
    )
    assert torch.equal(state["t"].to_local(), cut(7, mesh).to_local())
    assert state["p"].value == 10 + rank
    with pytest.raises(CheckpointException, match=r"SPMDLoadPlanner\(process_group=…\)"):
        load(state, checkpoint_id=folder / "dcp", planner=SPMDLoadPlanner(), process_group=group)
    options = Options(stop_on_notice=False)
    with CheckpointManager(folder / "root", save=1, process_group=group, options=options) as manager:
        manager.save(1, {"t": cut(9, mesh)}).result()
        manager.restore(state, 1, items=["t"])
    assert torch.equal(state["t"].to_local(), cut(9, mesh).to_local())
    planner = SPMDSavePlanner(process_group=group)
    with pytest.raises(CheckpointException) as raised:
        save({"t": cut(7, everyone)}, checkpoint_id=folder / "no", planner=planner, process_group=group)
    for error, _ in raised.value.failures.values():
        assert isinstance(error, UnsupportedShardingError)
        assert str(error).startswith("t: its part at (0,) lies on rank 0, which isn't in the process group")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    this_rank, place = int(sys.argv[1]), Path(sys.argv[3])
    join(this_rank, int(sys.argv[2]), place)
    in_a_group(this_rank, place, dist.new_group(MEMBERS))
    # Rank 0 has the store, which the others need.
    dist.barrier()
    dist.destroy_process_group()
