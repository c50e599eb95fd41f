"""Code that moves tensors by torch_xla's planners, step by step. Which library it runs with is all that differs."""

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

xc: Any = importlib.import_module(sys.argv[1])


def state_on(mesh_shape: tuple[int, ...] | None, seed: int) -> dict[str, Any]:
    """Make a tensor that is cut along the mesh's second axis, and one that is replicated; no mesh leaves both whole."""
    torch.manual_seed(seed)
    cut, whole = torch.randn(16, 8).to("xla"), torch.randn(6).to("xla")
    if mesh_shape is not None:
        mesh = xs.Mesh(np.arange(4), mesh_shape, ("data", "model"))
        xs.mark_sharding(cut, mesh, ("data", "model"))
        xs.mark_sharding(whole, mesh, (None,))
    torch_xla.sync()
    xm.wait_device_ops()
    return {"layer": {"cut": cut, "whole": whole}}


def padded_on(axis: int, seed: int) -> dict[str, Any]:
    """Make a tensor that is cut along this axis into parts that can't all be of one size."""
    torch.manual_seed(seed)
    cut, whole = torch.randn(63, 127).to("xla"), torch.randn(63).to("xla")
    xs.mark_sharding(
        cut, xs.Mesh(np.arange(4), (4,)), tuple(0 if each == axis else None for each in range(2))
    )
    torch_xla.sync()
    xm.wait_device_ops()
    return {"layer": {"cut": cut, "whole": whole}}


def numbers(state: dict[str, Any]) -> list[Any]:
    return [tensor.cpu().tolist() for tensor in state["layer"].values()]


def shards_of(state: dict[str, Any]) -> list[torch.Tensor]:
    return [shard.unpadded_data for shard in xs.wrap_if_sharded(state["layer"]["cut"]).local_shards]


def moved(folder: Path) -> dict[str, Any]:
    """Save on one layout and load on another, with a stock planner on the side that is whole."""
    seen = {}
    for name, source, target in (
        ("apart", None, (1, 4)),
        ("together", (1, 4), None),
        ("onto another mesh", (2, 2), (4, 1)),
        ("onto the mesh transposed", (1, 4), (4, 1)),
        ("cut along the other axis", "padded", "padded"),
    ):
        if isinstance(source, str) or isinstance(target, str):
            saved, loaded = padded_on(0, 1), padded_on(1, 2)
        else:
            saved, loaded = state_on(source, 1), state_on(target, 2)
        assert numbers(saved) != numbers(loaded)
        planners = (
            DefaultSavePlanner() if source is None else xc.SPMDSavePlanner(),
            DefaultLoadPlanner() if target is None else xc.SPMDLoadPlanner(),
        )
        save(saved, storage_writer=FileSystemWriter(folder / name), planner=planners[0])
        load(loaded, storage_reader=FileSystemReader(folder / name), planner=planners[1])
        seen[name] = numbers(loaded) == numbers(saved)
    return seen


def written(mesh_shape: tuple[int, ...]) -> list[Any]:
    """Find for each item the shard that it writes, by the position that it tells. Arguments come by place."""
    state = state_on(mesh_shape, 3)
    planner = xc.SPMDSavePlanner()
    planner.set_up_planner(state, True)
    plan = planner.create_local_plan()
    shards = shards_of(state)
    seen = []
    for item in plan.items:
        same = None
        if item.index.fqn in planner.sharded_state_dict:
            same = torch.equal(planner.resolve_data(item), shards[item.index.index])
        seen.append([item.index.fqn, list(item.index.offset), item.index.index, same])
    return [planner.is_coordinator, sorted(planner.unsharded_state_dict), sorted(seen)]


def read_by_items(folder: Path) -> dict[str, Any]:
    """Commit the items of a load one by one: the tensor changes with the last of them."""
    save(state_on(None, 4), storage_writer=FileSystemWriter(folder), planner=DefaultSavePlanner())
    state = state_on((1, 4), 5)
    planner = xc.SPMDLoadPlanner()
    planner.set_up_planner(state, FileSystemReader(folder).read_metadata(), True)
    items = [item for item in planner.create_local_plan().items if item.dest_index.fqn == "layer.cut"]
    before, changed = shards_of(state), []
    for item in items:
        changed.append(any(map(torch.ne, map(torch.sum, before), map(torch.sum, shards_of(state)))))
        planner.commit_tensor(item, planner.resolve_tensor(item).fill_(7.0))
    n_elements = sum(int(np.prod(item.lengths)) for item in items)
    after = state["layer"]["cut"].cpu()
    return {"changed before": any(changed), "elements": n_elements, "all": bool((after == 7.0).all())}


def main(folder: Path) -> None:
    seen = {
        "moved": moved(folder),
        "written": [written(shape) for shape in ((1, 4), (4, 1), (2, 2))],
        "read": read_by_items(folder / "whole"),
    }
    (folder / "seen.json").write_text(json.dumps(seen, indent=1))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    xr.use_spmd()
    main(Path(sys.argv[2]))
