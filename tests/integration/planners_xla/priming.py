"""Primed state on sharded parameters: placed as a real step places it, and nothing else changed."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from torch_xla.amp import syncfree
from typing_extensions import override

from stepkeeper_planners import prime_optimizer
from stepkeeper_planners.errors import PrimeError

_C: Any = torch_xla._XLAC
Make = Callable[[Any], Optimizer]
Training = tuple[torch.nn.Module, Optimizer]
SGD, ADAM, ADAMW, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop


class MasterWeights(Optimizer):
    """An optimizer that isn't torch's own: its state is made from the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"], state["momentum"] = p.detach().clone(), torch.zeros_like(p)
                state["momentum"].mul_(0.9).add_(p.grad)
                state["master"].sub_(group["lr"] * state["momentum"])
                p.copy_(state["master"])


class OwnShardings(Optimizer):
    """An optimizer that divides its state among all devices, as ZeRO does, however its parameters are marked."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                    state["sums"] = torch.zeros(p.shape[-1:], device=p.device)
                    state["step"] = torch.zeros((4,), device=p.device)
                    for name in OWN:
                        divide(state[name])
                state["momentum"].mul_(0.9).add_(p.grad)
                state["sums"].add_(p.grad.square().sum(tuple(range(p.dim() - 1))))
                state["step"].add_(1)
                p.sub_(group["lr"] * state["momentum"])


OWN = ("momentum", "sums", "step")
"""The state that OwnShardings divides: of the parameter's shape, of another one, and a number that steps change."""


def divide(tensor: torch.Tensor) -> None:
    """Divide the last dimension among all devices."""
    xs.mark_sharding(tensor, xs.Mesh(np.arange(4), (4,)), (*(None,) * (tensor.dim() - 1), 0))


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
    "own-shardings": OwnShardings,
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


def bare(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.global_tensor if isinstance(tensor, xs.XLAShardedTensor) else tensor


def sharding_of(tensor: torch.Tensor) -> str:
    """Return "" where nobody has marked the tensor and no program has made it: XLA may choose its sharding."""
    return str(_C._get_xla_sharding_spec(bare(tensor))) if tensor.device.type == "xla" else "cpu"


def on_cpu(tree: Any) -> Any:
    return tree_map(lambda leaf: bare(leaf).detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, tree)


def equal(a: Any, b: Any) -> bool:
    pairs = zip(tree_leaves(on_cpu(a)), tree_leaves(on_cpu(b)), strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


def described(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else type(leaf)


def tensors_of(training: Training) -> dict[str, torch.Tensor]:
    """The parameters and the tensors of their state, by name."""
    model, optimizer = training
    found: dict[str, torch.Tensor] = {}
    for index, parameter in enumerate(model.parameters()):
        entry = optimizer.state.get(parameter, {})
        tensors = {"parameter": parameter} | {k: v for k, v in entry.items() if isinstance(v, torch.Tensor)}
        found |= {f"{index}.{name}": bare(tensor) for name, tensor in tensors.items()}
    return found


def shardings_of(training: Training) -> dict[str, str]:
    return {name: sharding_of(tensor) for name, tensor in tensors_of(training).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step of a training ran, and what it left."""

    program: str
    """torch_xla's hash of it, shardings included: two programs of one hash are compiled once."""

    n_compiled: int
    shardings: dict[str, str]
    values: dict[str, torch.Tensor]


def take_step(training: Training) -> Step:
    model, optimizer = training
    optimizer.zero_grad()
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model(batch.to("xla")).square().mean().backward()
    optimizer.step()
    tensors = [
        *tensors_of(training).values(),
        *(bare(p.grad) for p in model.parameters() if p.grad is not None),
    ]
    tensors = [tensor for tensor in tensors if tensor.device.type == "xla"]
    is_pending = _C._check_tensor_need_materialization(tensors)
    # What the devices still compute has no buffers yet, and torch_xla doesn't wait for them here: it would crash.
    xm.wait_device_ops()
    program = _C._get_graph_hash([t for t, pending in zip(tensors, is_pending, strict=True) if pending])
    before = count_compilations()
    torch_xla.sync()
    return Step(
        program=program.hex(),
        n_compiled=count_compilations() - before,
        shardings=shardings_of(training),
        values={name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors_of(training).items()},
    )


def count_compilations() -> int:
    return int(met.counter_value("UncachedCompile") or 0)


def new_training(kind: str, mesh_shape: tuple[int, ...], like: Training | None = None) -> Training:
    """Return a model and its optimizer; with `like`, each parameter is marked with that one's sharding."""
    model = sharded_model(mesh_shape)
    if like is not None:
        for parameter, other in zip(model.parameters(), like[0].parameters(), strict=True):
            if not sharding_of(parameter):
                _C._xla_mark_sharding(bare(parameter), _C._get_xla_op_sharding(bare(other)))
    optimizer = KINDS[kind](model.parameters())
    torch_xla.sync()
    return model, optimizer


def prime_and_nothing_else(training: Training) -> None:
    model, optimizer = training
    groups, values = optimizer.state_dict()["param_groups"], on_cpu(list(model.parameters()))
    before = [sharding_of(parameter) for parameter in model.parameters()]
    seed, pending = xm.get_rng_state(), torch.ones(2, device="xla") + 1
    prime_optimizer(optimizer)
    assert _C._check_tensor_need_materialization([pending]) == [True], "work of the training was started"
    assert xm.get_rng_state() == seed
    assert equal(values, list(model.parameters()))
    assert before == [sharding_of(parameter) for parameter in model.parameters()]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert equal(groups, optimizer.state_dict()["param_groups"])
    made = [tensor for tensor in tensors_of(training).values() if tensor.device.type == "xla"]
    assert not any(_C._check_tensor_need_materialization(made)), "what was made is still to be computed"


def set_back(training: Training, to: Training) -> None:
    """Give the training the other one's values, in place."""
    others = on_cpu(tensors_of(to))
    for name, tensor in tensors_of(training).items():
        tensor.detach().copy_(others[name])
    # By a sync the values go where the tensors' shardings say; a program that used them before would replicate them.
    torch_xla.sync()


def runs_the_programs_of_unprimed_training(kind: str, mesh_shape: tuple[int, ...]) -> None:
    """Compare programs with those of unprimed training, whose first step no primed one equals bit by bit.

    That step has the state's zeros compiled into it, later ones and a primed one read them. The compiler contracts
    and fuses the two differently, and so rounds them differently on some processors.
    """
    plain = new_training(kind, mesh_shape)
    first, second = take_step(plain), take_step(plain)
    xla_shards_what_is_not_marked(kind, mesh_shape, first, second)
    marked = new_training(kind, mesh_shape, like=plain)
    prime_and_nothing_else(marked)
    assert tree_map(described, marked[1].state_dict()) == tree_map(described, plain[1].state_dict()), kind
    assert shardings_of(marked) == second.shardings, kind
    set_back(plain, to=marked)
    later, ours = take_step(plain), take_step(marked)
    assert (ours.program, ours.n_compiled, ours.shardings) == (later.program, 0, later.shardings), kind
    for name, value in later.values.items():
        assert torch.equal(ours.values[name], value), (kind, name)
    # Adafactor computes a weight of exactly 1 from a count of 1, which torch_xla compiles in as a constant.
    assert later.program == second.program or kind == "adafactor", kind


def xla_shards_what_is_not_marked(kind: str, mesh_shape: tuple[int, ...], first: Step, second: Step) -> None:
    """Compare two steps after priming with the first two without it, where XLA shards one parameter and its state."""
    primed = new_training(kind, mesh_shape)
    prime_and_nothing_else(primed)
    ours = take_step(primed)
    assert {name: described(value) for name, value in ours.values.items()} == {
        name: described(value) for name, value in first.values.items()
    }, kind
    assert ours.shardings == first.shardings, kind
    for name, value in first.values.items():
        torch.testing.assert_close(ours.values[name], value, msg=f"{kind} {name}: {{}}".format)
    ours = take_step(primed)
    assert (ours.program, ours.n_compiled, ours.shardings) == (second.program, 0, second.shardings), kind


def state_stays_replicated_with_a_parameter_that_is_marked_so() -> None:
    """Without priming XLA would shard this state. Where all is marked there is one program, also after a restart."""
    model = sharded_model((2, 2))
    layers: Any = model
    xs.mark_sharding(layers[2].bias, xs.Mesh(np.arange(4), (2, 2)), (None,))
    training = model, ADAMW(model.parameters(), capturable=True)
    torch_xla.sync()
    prime_and_nothing_else(training)
    placed = shardings_of(training)
    assert {placed[f"5.{name}"] for name in ("parameter", "exp_avg", "exp_avg_sq")} == {"{replicated}"}
    first, second = take_step(training), take_step(training)
    assert first.shardings == second.shardings == placed
    assert (second.program, second.n_compiled) == (first.program, 0)


def parameters_that_are_copied_are_left_to_xla_too() -> None:
    model = sharded_model((2, 2))
    training = model, MasterWeights(model.parameters())
    torch_xla.sync()
    prime_and_nothing_else(training)
    placed, values = shardings_of(training), on_cpu(tensors_of(training))
    assert {placed[f"5.{name}"] for name in ("parameter", "master", "momentum")} == {""}
    assert all(torch.equal(values[f"{i}.master"], values[f"{i}.parameter"]) for i in range(6))


def a_step_that_takes_what_a_scaler_found_is_not_primed() -> None:
    for kind in (syncfree.SGD, syncfree.Adam, syncfree.AdamW):
        optimizer = kind([torch.nn.Parameter(torch.ones(2, device="xla"))], lr=0.1)
        with pytest.raises(PrimeError, match="found_inf"):
            prime_optimizer(optimizer)
        assert not optimizer.state


def main(kinds: list[str]) -> None:
    for index, kind in enumerate(KINDS):
        if kind in (kinds or KINDS):
            runs_the_programs_of_unprimed_training(kind, [(2, 2), (4, 1), (1, 4)][index % 3])
    if not kinds:
        state_stays_replicated_with_a_parameter_that_is_marked_so()
        parameters_that_are_copied_are_left_to_xla_too()
        a_step_that_takes_what_a_scaler_found_is_not_primed()


if __name__ == "__main__":
    xr.use_spmd()
    main(sys.argv[1:])
