"""One of two ranks with optimizers of wrapped modules: python optimizers.py RANK WORLD_SIZE FOLDER SCENARIO."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from stepkeeper import prime_optimizer
from stepkeeper.dcp import StorageReader
from stepkeeper_planners import SPMDSavePlanner
from stepkeeper_planners.errors import UnsupportedValueError
from stepkeeper_planners.state.tree import flatten_state
from stepkeeper_testing.trainer import join, open_manager

RANK, WORLD_SIZE, FOLDER, SCENARIO = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def in_ddp() -> nn.Module:
    return DistributedDataParallel(make_model())


def in_fsdp2() -> nn.Module:
    model = make_model()
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def in_fsdp1(*, use_orig_params: bool = False) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return FullyShardedDataParallel(
        make_model(), device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )


WRAPS: dict[str, Callable[[], Any]] = {
    "ddp": in_ddp,
    "compiled_ddp": lambda: torch.compile(in_ddp()),
    "fsdp2": in_fsdp2,
    "fsdp1": in_fsdp1,
    "fsdp1_original": lambda: in_fsdp1(use_orig_params=True),
}


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that the optimizer has, under torch's own names."""
    return gathered(get_optimizer_state_dict(model, optimizer, options=FLAT))


def gathered(found: Any) -> dict[str, Any]:
    return {n: each.full_tensor() if isinstance(each, DTensor) else each for n, each in found.items()}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    eager = getattr(model, "_orig_mod", model)
    for number in (1, 2):
        torch.autograd.backward(eager(torch.full((2, 4), float(number))).square().sum())
        optimizer.step()
        optimizer.zero_grad()


def make_optimizer(model: nn.Module, lr: float, *, is_reversed: bool = False) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[:: -1 if is_reversed else 1], lr=lr)
    if SCENARIO == "fsdp2":
        # A DTensor among the options of a group.
        optimizer.param_groups[0]["anchor"] = torch.full_like(parameters[0].detach(), lr)
    return optimizer


def of_two_stages() -> None:
    """Each rank has another module and another optimizer."""
    model = nn.Sequential()
    model.add_module(f"layer{RANK}", nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    step(model, optimizer)
    state = {"state": {"model": model, f"optimizer{RANK}": optimizer}}
    save(state, checkpoint_id=FOLDER / SCENARIO, planner=SPMDSavePlanner())
    names = FileSystemReader(FOLDER / SCENARIO).read_metadata().state_dict_metadata
    for rank in range(WORLD_SIZE):
        assert f"state.optimizer{rank}.param_groups.layer{rank}.weight.lr" in names
    wanted = whole(model, optimizer)
    other = torch.optim.AdamW(model.parameters(), lr=0.5)
    theirs = {"state": {f"optimizer{RANK}": get_optimizer_state_dict(model, other, options=FLAT)}}
    load(theirs, checkpoint_id=FOLDER / SCENARIO)
    torch.testing.assert_close(theirs["state"][f"optimizer{RANK}"], wanted, rtol=0, atol=0)


def of_wrapped_modules() -> None:
    root = (FOLDER / SCENARIO).as_uri()
    model = WRAPS[SCENARIO]()
    optimizer = make_optimizer(model, 0.25)
    step(model, optimizer)
    wanted = whole(model, optimizer)
    with open_manager(root) as manager:
        manager.save(1, {"optimizer": optimizer, "model": model}).result()
    other = WRAPS[SCENARIO]()
    # FSDP1 flattens the parameters together, and DCP primes its optimizer.
    is_split = not SCENARIO.startswith("fsdp1")
    back = make_optimizer(other, 0.5, is_reversed=is_split)
    if is_split:
        prime_optimizer(back)
    with open_manager(root) as manager:
        restored = manager.restore({"optimizer": back, "model": other})
    torch.testing.assert_close(whole(other, back), wanted, rtol=0, atol=0)
    # Parts of what FSDP1 has flattened have no names without its module, and may differ from rank to rank.
    for without in () if is_split else ({}, {"inner": model.module}):
        with pytest.raises(UnsupportedValueError, match="have no names"):
            flatten_state({"optimizer": optimizer, **without})
    for more in () if is_split else ({"part": model.module[0]}, {"again": model}):
        names = flatten_state({"optimizer": optimizer, "model": model, **more}).tree["optimizer"]["state"]
        theirs: Any = get_optimizer_state_dict(model, optimizer)
        assert names.keys() == theirs["state"].keys()
    # torch's own code reads it under its own names.
    third = WRAPS[SCENARIO]()
    last = make_optimizer(third, 0.5)
    assert restored is not None
    state = {"optimizer": get_optimizer_state_dict(third, last, options=FLAT)}
    load(state, storage_reader=StorageReader(restored.uri))
    torch.testing.assert_close(gathered(state["optimizer"]), wanted, rtol=0, atol=0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    join(RANK, WORLD_SIZE, FOLDER)
    of_two_stages() if SCENARIO == "stages" else of_wrapped_modules()
    dist.barrier()
    dist.destroy_process_group()
