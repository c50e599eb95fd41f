"""One of four processes that save and load in groups of one to four, each number of ranks after each other."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from stepkeeper_planners import PerRank, SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper_planners.geometry.layout import Ranks

N_PROCESSES = 4


class Meeting:
    """All processes come here before any goes on."""

    def __init__(self, folder: Path) -> None:
        self.store = FileStore(str(folder / "meeting"), N_PROCESSES)
        self.count = 0

    def wait(self) -> None:
        self.count += 1
        if self.store.add(f"here-{self.count}", 1) == N_PROCESSES:
            self.store.set(f"go-{self.count}", "1")
        self.store.wait([f"go-{self.count}"])


@contextmanager
def group_of(world_size: int, rank: int, folder: Path, meeting: Meeting) -> Iterator[bool]:
    """The first processes are a group; the others wait until it has done."""
    member = rank < world_size
    meeting.wait()
    if member:
        store = FileStore(str(folder / f"group-{meeting.count}"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    yield member
    if member:
        dist.destroy_process_group()
    meeting.wait()


def later_half(values: Sequence[Any], ranks: Ranks) -> object:
    """Merge positions as a data loader might: all know how far all were together."""
    return {"seen": sum(value["seen"] for value in values), "of": ranks.world_size}


def tensors(seed: int, world_size: int) -> dict[str, Any]:
    """Placed by another rule for each number of ranks."""
    line = init_device_mesh("cpu", (world_size,))
    grid = init_device_mesh("cpu", (2, 2)) if world_size == 4 else None
    whole = {
        "rows": torch.arange(35.0).reshape(7, 5) + seed,
        "columns": (torch.arange(27).reshape(3, 9) + seed).to(torch.int16),
        "mixed": (torch.arange(60.0).reshape(6, 10) + seed).to(torch.bfloat16),
        "turned": torch.arange(24.0, dtype=torch.float64).reshape(4, 6) + seed,
    }

    def place(name: str, mesh: DeviceMesh, *placements: Placement) -> DTensor:
        return distribute_tensor(whole[name], mesh, placements, src_data_rank=None)

    sharded: dict[str, Any] = {
        "rows": place("rows", line, Shard(0)),
        "columns": place("columns", line, Shard(1)),
        "turned": place("turned", line, Shard(world_size % 2)),
        "mixed": place("mixed", line, Replicate() if world_size == 3 else Shard(1))
        if grid is None
        else place("mixed", grid, Shard(1), Shard(0)),
    }
    shared = torch.arange(100.0) + seed
    return {
        "sharded": sharded,
        "plain": {"embed": shared, "head": shared},
        "empty": torch.empty(0, 2),
        "step": seed,
    }


def own(seed: int, rank: int, resize: Callable[..., object] | None = later_half) -> PerRank:
    return PerRank({"seen": seed + rank, "of": 0}, resize)


def check(state: dict[str, Any], seed: int, world_size: int) -> None:
    want = tensors(seed, world_size)
    for name, tensor in want["sharded"].items():
        found = state["sharded"][name]
        assert isinstance(found, DTensor)
        assert found.placements == tensor.placements
        assert torch.equal(found.to_local(), tensor.to_local()), name
    assert torch.equal(state["plain"]["embed"], want["plain"]["embed"])
    assert state["step"] == seed


def all_pairs(rank: int, folder: Path, meeting: Meeting) -> None:
    sizes = range(1, N_PROCESSES + 1)
    for n in sizes:
        with group_of(n, rank, folder, meeting) as member:
            if member:
                save(
                    {**tensors(10 * n, n), "loader": own(n, rank)},
                    checkpoint_id=folder / f"ours-{n}",
                    planner=SPMDSavePlanner(),
                )
                save(tensors(10 * n, n), checkpoint_id=folder / f"stock-{n}")
    for m in sizes:
        with group_of(m, rank, folder, meeting) as member:
            for n in sizes if member else ():
                state = {**tensors(1, m), "loader": own(0, rank)}
                load(state, checkpoint_id=folder / f"ours-{n}", planner=SPMDLoadPlanner())
                check(state, 10 * n, m)
                total = sum(n + other for other in range(n))
                assert state["loader"].value == (
                    {"seen": n + rank, "of": 0} if n == m else {"seen": total, "of": m}
                )
                state = tensors(1, m)
                load(state, checkpoint_id=folder / f"stock-{n}", planner=SPMDLoadPlanner())
                check(state, 10 * n, m)
                state = tensors(1, m)
                load(state, checkpoint_id=folder / f"ours-{n}")
                check(state, 10 * n, m)


def main(rank: int, folder: Path) -> None:
    meeting = Meeting(folder)
    all_pairs(rank, folder, meeting)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
