"""One of several ranks: python mixed.py RANK WORLD_SIZE FOLDER ACTION…, an action being save|load:ours|stock:NAME.

The state has every kind of tensor that a rank may hold, and is a function of nothing but the world's layout.
"""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from stepkeeper_planners import PerRank, SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper_testing.trainer import join


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.arange(int(np.prod(shape))) % 251).reshape(shape).to(dtype)


def placed(whole: Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """Make tensors as FSDP and tensor parallelism leave them: cut by placements, strided ones too."""
    local = whole.new_empty(0)
    if mesh.get_coordinate() is not None:
        sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
        local = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].clone()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def rows_with_gaps(rank: int, world_size: int) -> Tensor:
    """Return every world_size-th row of a tensor of 12 x 3, as a CheckpointableTensor, with padding."""
    mine = range(rank, 12, world_size)
    local = torch.full((2 * len(mine), 5), -1, dtype=torch.int32)
    for place, row in enumerate(mine):
        local[2 * place, 1:4] = numbers(12, 3, dtype=torch.int32)[row]
    held: Any = local
    held.global_shape = (12, 3)
    held.global_offsets = tuple((row, 0) for row in mine)
    held.local_offsets = tuple((2 * place, 1) for place in range(len(mine)))
    held.local_sizes = ((1, 3),) * len(mine)
    return local


def make_state(rank: int, world_size: int) -> dict[str, Any]:
    """Make a state that stock planners can save and load too."""
    inner = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world_size // inner, inner), mesh_dim_names=("outer", "inner"))
    some = DeviceMesh("cpu", list(range(max(1, world_size - 1))))
    line = DeviceMesh("cpu", list(range(world_size)))
    backwards = DeviceMesh("cpu", list(range(world_size))[::-1])
    over = _StridedShard(0, split_factor=inner) if inner > 1 else Shard(0)
    tied = placed(numbers(5, 2), mesh, Shard(0), Replicate())
    return {
        "cut": {
            "both": placed(numbers(5, 7), mesh, Shard(0), Shard(1)),
            "strided": placed(numbers(7, 3, dtype=torch.float64), mesh, over, Shard(0)),
            "copied": placed(numbers(6, 5, dtype=torch.bfloat16), mesh, Replicate(), Shard(1)),
            "few_rows": placed(numbers(2, 9, dtype=torch.int64), mesh, Shard(0), Replicate()),
            "on_some": placed(numbers(8, 2, dtype=torch.int16), some, Shard(0)),
            "backwards": placed(numbers(9, 2), backwards, Replicate()),
            "few_of_many": placed(numbers(9, 2), line, Shard(0)),
            "slice": placed(numbers(4, 6), mesh["outer"], Shard(1)),
        },
        "tied": {"first": tied, "second": tied.detach()},
        "plain": [
            numbers(4, 3).t(),
            torch.tensor(7),
            torch.empty(0, 3),
            numbers(6, dtype=torch.complex64).conj(),
            {"step": 3},
        ],
        "value": {"name": "run", "lr": [0.1, 0.2], "array": np.arange(3)},
    }


def make_own_state(rank: int, world_size: int) -> dict[str, Any]:
    """Make a state that only our planners can save and load."""
    return make_state(rank, world_size) | {
        "rows": rows_with_gaps(rank, world_size),
        "loader": PerRank(
            {"position": 100 * world_size + rank},
            resize=lambda values, ranks: {"position": [len(values), ranks.rank]},
        ),
    }


def tensors(node: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(node, Tensor):
        yield name, node.to_local() if isinstance(node, DTensor) else node
    elif isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from tensors(value, f"{name}/{key}")


def run(action: str, rank: int, world_size: int, folder: Path) -> None:
    verb, whose, name, saved_by = action.split(":")
    ours = whose == "ours"
    state = (
        make_own_state(rank, world_size) if ours and "both-ways" not in name else make_state(rank, world_size)
    )
    if verb == "save":
        save(
            state,
            storage_writer=FileSystemWriter(folder / name),
            planner=SPMDSavePlanner() if ours else None,
        )
        return
    for tensor_name, tensor in tensors(state):
        if tensor_name != "/rows":
            tensor.zero_()
    if "rows" in state:
        state["rows"][::2, 1:4] = 0
    state["value"] = {"name": "", "lr": [], "array": np.zeros(1)}
    state["plain"][-1]["step"] = 0
    load(
        state,
        storage_reader=FileSystemReader(folder / name),
        planner=SPMDLoadPlanner() if ours else None,
    )
    want = make_own_state(rank, world_size)
    expected = dict(tensors(want))
    for tensor_name, tensor in tensors(state):
        assert torch.equal(tensor, expected[tensor_name]), f"{tensor_name}: {tensor}"
    assert (state["value"]["name"], state["value"]["lr"]) == ("run", [0.1, 0.2])
    assert np.array_equal(state["value"]["array"], np.arange(3))
    assert state["plain"][-1]["step"] == 3
    if "loader" in state:
        same = int(saved_by) == world_size
        position = 100 * world_size + rank if same else [int(saved_by), rank]
        assert state["loader"].value == {"position": position}


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    join(rank, world_size, folder)
    for action in sys.argv[4:]:
        run(action, rank, world_size, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
