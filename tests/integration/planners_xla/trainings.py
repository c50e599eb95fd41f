"""Trainings on four devices of torch_xla, with parameters and optimizers of many kinds, and what each step ran."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.distributed_checkpoint as torch_xla_checkpoint
import torch_xla.runtime as xr
from torch import nn
from torch.optim import Optimizer
from torch_xla.amp import syncfree
from typing_extensions import override

from stepkeeper_planners import prime_optimizer

_C: Any = torch_xla._XLAC
Spec = tuple[Any, ...]
SGD, ADAM, ADAMW, RMSPROP = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
OWN = ("momentum", "sums", "step")
"""The state that OwnShardings divides: of the parameter's shape, of another one, and a number that steps change."""


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


def divide(tensor: torch.Tensor) -> None:
    """Divide the last dimension among all devices."""
    xs.mark_sharding(tensor, xs.Mesh(np.arange(4), (4,)), (*(None,) * (tensor.dim() - 1), 0))


class ScaledAdamW(syncfree.AdamW):  # type: ignore[misc]  # torch_xla types it not
    """Gets what a gradient scaler has found, with which it makes other state than torch's. It can't be primed."""

    @override
    def step(self, closure: Any = None) -> Any:
        return super().step(closure, found_inf=torch.zeros((), device="xla"))


KINDS: dict[str, Callable[[Any], Optimizer]] = {
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
OPTIMIZERS = KINDS | {
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    # Otherwise its step writes through masks, for which XLA takes minutes on CPUs.
    "rprop": lambda p: torch.optim.Rprop(p, capturable=True),
    "asgd": torch.optim.ASGD,
    "muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2]),
}
"""All of torch's own but LBFGS, which needs a closure, and SparseAdam, which needs sparse gradients."""


def every_weight(n_dims: int) -> dict[str, Spec]:
    specs: list[Spec] = [(0, None), (None, 0), (0, None)] if n_dims == 1 else [(0, 1), (1, 0), (0, None)]
    return {f"{layer}.weight": spec for layer, spec in zip((0, 2, 4), specs, strict=True)}


MARKS: dict[str, Callable[[int], dict[str, Spec]]] = {
    "weights": every_weight,
    "weights and batch": every_weight,
    "one weight": lambda n_dims: {"2.weight": (n_dims - 1, None)},
    "everything": lambda n_dims: {
        **every_weight(n_dims),
        "0.bias": (0,),
        "2.bias": (None,),
        "4.bias": (n_dims - 1,),
    },
    "batch": lambda _: {},
    # In parts, in part replicated, replicated, and one parameter left to XLA.
    "mixed": lambda _: {
        "0.weight": (0, None),
        "0.bias": (0,),
        "2.weight": (None, 0),
        "2.bias": (None,),
        "4.weight": ((1, 0), None),
    },
}
"""Which parameters are marked, by what it is called. All else is sharded by propagation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one step ran, and what it left."""

    program: str
    """Its operations, with the shardings of what it reads, each once: as the compiler sees it."""
    key: str
    """torch_xla's hash of it: two programs of one hash are compiled once."""
    n_compiled: int
    loss: str
    device_bytes: int
    shardings: dict[str, str]
    values: dict[str, torch.Tensor]


class Training:
    def __init__(self, model: nn.Module, optimizer: Optimizer, batch_mesh: xs.Mesh | None = None) -> None:
        """With a mesh for it, the batch is divided among its first axis."""
        self.model, self.optimizer, self.batch_mesh = model, optimizer, batch_mesh
        torch_xla.sync()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and the tensors of their state, by name."""
        found: dict[str, torch.Tensor] = {}
        for index, parameter in enumerate(self.model.parameters()):
            entry = {"parameter": parameter, **self.optimizer.state.get(parameter, {})}
            tensors = {name: value for name, value in entry.items() if isinstance(value, torch.Tensor)}
            found |= {f"{index}.{name}": bare(tensor).detach() for name, tensor in tensors.items()}
        return found

    def on_devices(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.tensors().values() if tensor.device.type == "xla"]

    def shardings(self) -> dict[str, str]:
        """Return "" for what nobody has marked and no program has made: XLA may choose its sharding."""
        return {name: sharding_of(tensor) for name, tensor in self.tensors().items()}

    def values(self) -> dict[str, torch.Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors().items()}

    def device_bytes(self) -> int:
        """The memory of these tensors on all devices together."""
        mine = self.on_devices()
        placed = [tensor for tensor in mine if sharding_of(tensor)]
        n_bytes = sum(tensor.nbytes for tensor in mine) - sum(tensor.nbytes for tensor in placed)
        xm.wait_device_ops()
        shards = _C._get_local_shards(placed)
        sharded: int = sum(shard.nbytes for one in shards for shard, _ in one)
        return n_bytes * int(xr.global_runtime_device_count()) + sharded

    def run(self, numbers: Sequence[int]) -> list[Step]:
        return [self.step(number) for number in numbers]

    def step(self, number: int = 1) -> Step:
        batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(number)).to("xla")
        if self.batch_mesh is not None:
            xs.mark_sharding(batch, self.batch_mesh, (0, None))
        self.model.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        grads = [bare(p.grad) for p in self.model.parameters() if p.grad is not None]
        tensors = [loss, *self.on_devices(), *grads]
        pending = _C._check_tensor_need_materialization(tensors)
        tensors = [tensor for tensor, needed in zip(tensors, pending, strict=True) if needed]
        # What the devices still compute, as what a restore has started, has no buffers, and these don't wait for them.
        xm.wait_device_ops()
        text, key = _C._get_xla_tensors_hlo(tensors), _C._get_graph_hash(tensors).hex()
        before = count_compilations()
        torch_xla.sync()
        return Step(
            program="\n".join(sorted(set(re.sub(r"\.\d+", "", text).splitlines()))),
            key=key,
            n_compiled=count_compilations() - before,
            loss=loss.item().hex(),
            device_bytes=self.device_bytes(),
            shardings=self.shardings(),
            values=self.values(),
        )


def make_training(
    mesh_shape: tuple[int, ...],
    marks: str,
    make: Callable[[Any], Optimizer],
    *,
    primed: str = "none",
    width: int = 16,
    more_marks: Mapping[str, Spec] | None = None,
    like: Training | None = None,
) -> Training:
    """Make a small network whose parameters are marked in one of the ways that users choose.

    Args:
        mesh_shape: The mesh.
        marks: A key of MARKS.
        make: Makes the optimizer.
        primed: How it begins: with priming of "ours", of "theirs" (torch_xla's), or "none".
        width: The number of elements of the layers' rows.
        more_marks: Marks besides.
        like: Has each parameter that isn't marked get the sharding that it has there.

    """
    torch.manual_seed(1)
    layers = [nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)]
    model = nn.Sequential(*layers).to("xla")
    mesh = xs.Mesh(np.arange(xr.global_runtime_device_count()), mesh_shape)
    for name, spec in {**MARKS[marks](len(mesh_shape)), **(more_marks or {})}.items():
        xs.mark_sharding(model.get_parameter(name), mesh, spec)
    for parameter, other in zip(model.parameters(), like.model.parameters() if like else (), strict=False):
        if not sharding_of(parameter):
            _C._xla_mark_sharding(bare(parameter), _C._get_xla_op_sharding(bare(other)))
    optimizer = make(model.parameters())
    training = Training(model, optimizer, mesh if "batch" in marks else None)
    if primed == "ours":
        prime_optimizer(optimizer)
    elif primed == "theirs":
        torch_xla_checkpoint.prime_optimizer(optimizer)
        torch_xla.sync()
    return training


def bare(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.global_tensor if isinstance(tensor, xs.XLAShardedTensor) else tensor


def sharding_of(tensor: torch.Tensor) -> str:
    return str(_C._get_xla_sharding_spec(bare(tensor))) if tensor.device.type == "xla" else "cpu"


def count_compilations() -> int:
    return int(met.counter_value("UncachedCompile") or 0)
