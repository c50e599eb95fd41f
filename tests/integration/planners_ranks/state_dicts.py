"""One of several ranks: python state_dicts.py RANK WORLD_SIZE STAGE FOLDER [FROM].

Every kind of wrapped model is loaded from stage FROM, compared bit for bit with what that stage had, trained for two
steps, and saved as stage STAGE, each by torch's ways to get and set states, under the options that it stands for.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner

FULL = StateDictOptions(full_state_dict=True)


class Model(nn.Module):
    """Uneven sizes, a frozen layer, a buffer that changes, and an embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.seen = nn.Buffer(torch.zeros((), dtype=torch.int64))

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.add_(1)
        hidden = self.down(torch.relu(self.up(self.embedding(inputs))))
        out: Tensor = self.head(self.norm(self.frozen(hidden) + hidden))
        return out


class Alone(nn.Module):
    """A model of the same parts, none of them tied: FSDP over tensor parallelism cuts them all."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.head = nn.Linear(6, 11)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.down(torch.relu(self.up(inputs))))
        return out


def wrap_fsdp(world_size: int) -> nn.Module:
    model = Model()
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def wrap_hybrid(world_size: int) -> nn.Module:
    """Copied over one half of the mesh's dimensions, cut over the other."""
    shards = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world_size // shards, shards), mesh_dim_names=("copies", "shards"))
    model = Model()
    fully_shard(model, mesh=mesh)
    return model


def wrap_tensor_parallel(world_size: int) -> nn.Module:
    """FSDP over tensor parallelism: strided shards."""
    tp = 2 if world_size % 2 == 0 else world_size
    mesh = init_device_mesh("cpu", (world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    model = Alone()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    return model


def wrap_ddp(world_size: int) -> nn.Module:
    del world_size
    return DistributedDataParallel(Model())


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    wrap: Callable[[int], nn.Module]
    options: StateDictOptions


CASES = {
    "fsdp": Case(wrap=wrap_fsdp, options=StateDictOptions()),
    "fsdp-flat": Case(wrap=wrap_fsdp, options=StateDictOptions(flatten_optimizer_state_dict=True)),
    "fsdp-offload": Case(wrap=wrap_fsdp, options=StateDictOptions(cpu_offload=True)),
    "fsdp-full": Case(wrap=wrap_fsdp, options=FULL),
    "fsdp-no-frozen": Case(wrap=wrap_fsdp, options=StateDictOptions(ignore_frozen_params=True, strict=False)),
    "fsdp-broadcast": Case(
        wrap=wrap_fsdp,
        options=StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
    ),
    "hybrid": Case(wrap=wrap_hybrid, options=StateDictOptions()),
    "tensor-parallel": Case(wrap=wrap_tensor_parallel, options=StateDictOptions()),
    "tensor-parallel-flat": Case(
        wrap=wrap_tensor_parallel, options=StateDictOptions(flatten_optimizer_state_dict=True)
    ),
    "ddp": Case(wrap=wrap_ddp, options=StateDictOptions()),
    "ddp-flat": Case(wrap=wrap_ddp, options=StateDictOptions(flatten_optimizer_state_dict=True)),
}


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    return {"model": model_state, "optimizer": optimizer_state}


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state as one process would have it, in memory of its own."""
    return dict(_bits(state_of(model, optimizer, FULL), ""))


def _bits(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _bits(value, f"{name}/{key}")
    elif isinstance(node, list) and any(isinstance(item, dict) for item in node):
        for index, item in enumerate(node):
            yield from _bits(item, f"{name}/{index}")
    else:
        yield name, node.detach().clone() if isinstance(node, Tensor) else node


def differences(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    found = [f"{name} is on one side only" for name in got.keys() ^ want.keys()]
    for name in got.keys() & want.keys():
        a, b = got[name], want[name]
        if isinstance(a, tuple | list):
            # Setting a full state makes lists of an optimizer's tuples.
            a, b = list(a), list(b)
        same = torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else a == b
        if not same:
            found.append(f"{name}: {a} instead of {b}")
    return found


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2):
        inputs = torch.randint(11, (4, 3), generator=generator)
        if isinstance(model, Alone):
            inputs = torch.rand(4, 6, generator=torch.Generator().manual_seed(0))
        optimizer.zero_grad()
        torch.autograd.backward(model(inputs).square().sum())
        optimizer.step()


def restore(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    options = case.options
    state = state_of(model, optimizer, options)
    load(state, storage_reader=FileSystemReader(checkpoint), planner=SPMDLoadPlanner())
    # Not by set_state_dict(): where a rank's states are empty, for rank 0 broadcasts them, it does nothing.
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def run(name: str, case: Case, rank: int, world_size: int, folder: Path, stages: list[str]) -> None:
    stage, *before = stages
    torch.manual_seed(len(stage))
    model = case.wrap(world_size)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01 * (2 + len(before)))
    frozen = {key: value for key, value in model.state_dict().items() if "frozen" in key}
    for source in before:
        want = torch.load(folder / source / f"{name}.pt", weights_only=True)
        restore(case, model, optimizer, folder / source / name)
        got = whole(model, optimizer)
        if case.options.ignore_frozen_params:
            assert frozen, "there is something that isn't restored"
            got, want = ({k: v for k, v in each.items() if "frozen" not in k} for each in (got, want))
        found = differences(got, want)
        assert not found, f"{name} from {source}: " + "\n".join(found)
    train(model, optimizer, rank)
    state = state_of(model, optimizer, replace(case.options, broadcast_from_rank0=False))
    save(state, storage_writer=FileSystemWriter(folder / stage / name), planner=SPMDSavePlanner())
    reference = whole(model, optimizer)
    if rank == 0:
        torch.save(reference, folder / stage / f"{name}.pt")


def main() -> None:
    rank, world_size, folder, stages = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]
    store = FileStore(str(folder / f"store-{stages[0]}"), world_size)
    patience = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)
    (folder / stages[0]).mkdir(exist_ok=True)
    for name, case in CASES.items():
        run(name, case, rank, world_size, folder, stages)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()
