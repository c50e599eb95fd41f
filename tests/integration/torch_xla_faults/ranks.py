"""One of several ranks without devices: what stock's, torch_xla's and our planners do with what all or each have."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from typing_extensions import override

from stepkeeper_planners import PerRank, SPMDLoadPlanner, SPMDSavePlanner

ELEMENTS: Final = 1 << 20
Planners = tuple[type[SavePlanner], type[LoadPlanner]]


def planners(whose: str) -> Planners:
    if whose == "stock":
        return DefaultSavePlanner, DefaultLoadPlanner
    if whose == "ours":
        return SPMDSavePlanner, SPMDLoadPlanner
    import torch_xla.experimental.distributed_checkpoint as theirs

    return theirs.SPMDSavePlanner, theirs.SPMDLoadPlanner


def shares(folder: Path) -> list[int]:
    """Eighths of the tensor that each rank wrote."""
    sizes = [0] * dist.get_world_size()
    for path in folder.glob("*.distcp"):
        sizes[int(path.name.split("_")[2])] += path.stat().st_size
    return [round(8 * size / (4 * ELEMENTS)) for size in sizes]


def replicated(whose: Planners, folder: Path) -> Any:
    """A model that every rank has: one large tensor, as an embedding is."""
    save(
        {"w": torch.ones(1024, ELEMENTS // 1024)}, storage_writer=FileSystemWriter(folder), planner=whose[0]()
    )
    return shares(folder)


def replicated_layers(whose: Planners, folder: Path) -> Any:
    state = {f"layer{i}": torch.ones(ELEMENTS // 8) for i in range(8)}
    save(state, storage_writer=FileSystemWriter(folder), planner=whose[0]())
    return shares(folder)


def hybrid_sharded(whose: Planners, folder: Path) -> Any:
    """Sharded over half of the ranks, with a copy on the other half."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    tensor = distribute_tensor(torch.ones(1024, ELEMENTS // 1024), mesh, [Replicate(), Shard(0)])
    save({"w": tensor}, storage_writer=FileSystemWriter(folder), planner=whose[0]())
    return shares(folder)


def value_of_each_rank(whose: Planners, folder: Path) -> Any:
    """Save a data loader's position, which differs from rank to rank."""
    rank = dist.get_rank()
    save({"loader": {"seen": rank * 10}}, storage_writer=FileSystemWriter(folder), planner=whose[0]())
    state = {"loader": {"seen": -1}}
    load(state, storage_reader=FileSystemReader(folder), planner=whose[1]())
    return state["loader"]["seen"]


def value_of_each_rank_said_so(whose: Planners, folder: Path) -> Any:
    rank = dist.get_rank()
    state = {"w": torch.ones(2), "loader": PerRank({"seen": rank * 10})}
    save(state, storage_writer=FileSystemWriter(folder), planner=whose[0]())
    box = PerRank(None)
    load({"w": torch.ones(2), "loader": box}, storage_reader=FileSystemReader(folder), planner=whose[1]())
    return box.value


class _Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    @override
    def __reduce__(self) -> Any:
        return os.makedirs, (self.mark, 0o777, True)


def code_in_a_value(whose: Planners, folder: Path) -> Any:
    """Somebody wrote a value into the checkpoint that runs code when it is read."""
    mark = folder.with_name(f"{folder.name}-ran")
    save({"x": _Runs(mark)}, storage_writer=FileSystemWriter(folder), planner=DefaultSavePlanner())
    try:
        load({"x": 0}, storage_reader=FileSystemReader(folder), planner=whose[1]())
    except CheckpointException:
        return "ran" if mark.exists() else "refused"
    return "ran" if mark.exists() else "read"


def observed(whose: str, folder: Path) -> dict[str, Any]:
    looks = [replicated, replicated_layers, hybrid_sharded, value_of_each_rank, code_in_a_value]
    looks += [value_of_each_rank_said_so] if whose == "ours" else []
    results: dict[str, Any] = {}
    for look in looks:
        try:
            results[look.__name__] = look(planners(whose), folder / whose / look.__name__)
        except CheckpointException as error:
            results[look.__name__] = [f"{type(e).__name__}: {e}" for e, _ in error.failures.values()]
        except Exception as error:
            # What is raised is what is seen.
            results[look.__name__] = f"{type(error).__name__}: {error}"
    return results


def main(rank: int, world_size: int, folder: Path) -> None:
    store = FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    results = {whose: observed(whose, folder) for whose in ("stock", "theirs", "ours")}
    (folder / f"results{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
