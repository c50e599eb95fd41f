"""Primed state on sharded parameters: placed as a real step places it, loaded into, and nothing else changed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.distributed_checkpoint as torch_xla_checkpoint
import torch_xla.runtime as xr
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner, prime_optimizer

_C: Any = torch_xla._XLAC
Make = Callable[[Any], Optimizer]
SGD, ADAM, ADAMW, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
KINDS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd-momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: ADAM(p, lr=0.1, weight_decay=0.1),
    "adamw-amsgrad": lambda p: ADAMW(p, amsgrad=True),
    "adamw-foreach": lambda p: ADAMW(p, foreach=True),
    "adamw-capturable": lambda p: ADAMW(p, capturable=True),
    "adamw-tensor-lr": lambda p: ADAMW(p, lr=torch.tensor(0.1, device="xla"), capturable=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda p: RMSPROP(p, centered=True, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


def sharded_model(mesh_shape: tuple[int, ...]) -> torch.nn.Sequential:
    """Parameters in parts, in part replicated, replicated, and left to the compiler."""
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4), torch.nn.Linear(4, 4))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    model = model.to("xla")
    mesh = xs.Mesh(np.arange(4), mesh_shape)
    layers: Any = model
    specs: list[tuple[Any, str, tuple[Any, ...]]] = [
        (layers[0], "weight", (0, None)),
        (layers[0], "bias", (0,)),
    ]
    specs += [
        (layers[1], "weight", (None, 0)),
        (layers[1], "bias", (None,)),
        (layers[2], "weight", ((1, 0), None)),
    ]
    for layer, name, spec in specs:
        xs.mark_sharding(getattr(layer, name), mesh, spec)
    return model


def train(model: torch.nn.Module, optimizer: Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=generator).to("xla")).square().mean().backward()
        optimizer.step()
        torch_xla.sync()


def bare(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.global_tensor if isinstance(tensor, xs.XLAShardedTensor) else tensor


def spec_of(tensor: torch.Tensor) -> str:
    spec: str = _C._get_xla_sharding_spec(bare(tensor)) if tensor.device.type == "xla" else "cpu"
    return "" if spec == "{replicated}" else spec


def on_cpu(tree: Any) -> Any:
    return tree_map(lambda leaf: bare(leaf).detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, tree)


def equal(a: Any, b: Any) -> bool:
    pairs = zip(tree_leaves(on_cpu(a)), tree_leaves(on_cpu(b)), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def described(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else type(leaf)


def as_a_real_step_leaves_it(kind: str, mesh_shape: tuple[int, ...]) -> None:
    primed, stepped = sharded_model(mesh_shape), sharded_model(mesh_shape)
    optimizer, real = KINDS[kind](primed.parameters()), KINDS[kind](stepped.parameters())
    torch_xla.sync()
    groups = optimizer.state_dict()["param_groups"]
    values, specs = on_cpu(list(primed.parameters())), [spec_of(p) for p in primed.parameters()]
    seed, grads = xm.get_rng_state(), [p.grad for p in primed.parameters()]
    pending = torch.ones(2, device="xla") + 1
    prime_optimizer(optimizer)
    assert _C._check_tensor_need_materialization([pending]) == [True], "work of the training was started"
    assert xm.get_rng_state() == seed
    assert equal(values, list(primed.parameters())), kind
    assert specs == [spec_of(p) for p in primed.parameters()]
    assert grads == [None] * len(grads) == [p.grad for p in primed.parameters()]
    assert equal(groups, optimizer.state_dict()["param_groups"])
    train(stepped, real, 1, seed=1)
    mine, theirs = optimizer.state_dict(), real.state_dict()
    assert tree_map(described, mine) == tree_map(described, theirs), kind
    for index, entry in theirs["state"].items():
        for name, tensor in entry.items():
            place = f"{kind} {mesh_shape} {index}.{name}"
            if isinstance(tensor, torch.Tensor):
                given = mine["state"][index][name]
                parameter = list(primed.parameters())[index]
                if specs[index] and given.shape == parameter.shape:
                    assert spec_of(given) == spec_of(tensor), place
                    # Adagrad makes its state on its own before any step, where nothing is known of shardings.
                    assert spec_of(given) == specs[index] or kind == "adagrad", place
                assert (
                    not _C._check_tensor_need_materialization([bare(given)])[0]
                    if given.device.type == "xla"
                    else 1
                )
    # Training on is as if nothing had been called.
    train(primed, optimizer, 1, seed=1)
    assert equal(list(primed.parameters()), list(stepped.parameters())), kind


def a_load_fills_it(folder: Path, kind: str) -> None:
    first, second = sharded_model((2, 2)), sharded_model((4, 1))
    trained, resumed = KINDS[kind](first.parameters()), KINDS[kind](second.parameters())
    train(first, trained, 2, seed=1)
    state = {"model": first.state_dict(), "optimizer": trained.state_dict()}
    save(state, storage_writer=FileSystemWriter(folder), planner=SPMDSavePlanner())
    prime_optimizer(resumed)
    target = {"model": second.state_dict(), "optimizer": resumed.state_dict()}
    load(target, storage_reader=FileSystemReader(folder), planner=SPMDLoadPlanner())
    second.load_state_dict(target["model"])
    resumed.load_state_dict(target["optimizer"])
    assert equal(trained.state_dict(), resumed.state_dict())
    for model, optimizer in ((first, trained), (second, resumed)):
        train(model, optimizer, 1, seed=5)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.allclose(bare(a).detach().cpu(), bare(b).detach().cpu(), atol=1e-6)


def theirs_changes_what_it_should_not() -> None:
    model = sharded_model((2, 2))
    optimizer = ADAMW(model.parameters(), lr=0.1, weight_decay=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    torch_xla.sync()
    before, seed = on_cpu(list(model.parameters())), xm.get_rng_state()
    torch_xla_checkpoint.prime_optimizer(optimizer)
    assert not equal(before, list(model.parameters())), "theirs no longer decays the parameters"
    assert xm.get_rng_state() != seed, "theirs no longer draws random seeds"
    assert all(p.grad is not None for p in model.parameters()), "theirs no longer leaves gradients"
    assert calls == [1], "theirs no longer takes a step that hooks see"
    assert float(optimizer.state_dict()["state"][0]["step"]) == 1, "theirs no longer counts a step"
    del schedule


def main(folder: Path) -> None:
    for index, kind in enumerate(KINDS):
        as_a_real_step_leaves_it(kind, [(2, 2), (4, 1), (1, 4)][index % 3])
    for kind in ("adam", "sgd-momentum", "adafactor"):
        a_load_fills_it(folder / kind, kind)
    theirs_changes_what_it_should_not()


if __name__ == "__main__":
    xr.use_spmd()
    main(Path(sys.argv[1]))
