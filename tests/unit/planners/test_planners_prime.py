"""Compare a primed optimizer with one after a real step, and test that everything else stays as it was."""

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from stepkeeper_planners import prime_optimizer
from stepkeeper_planners.errors import PrimeError

Make = Callable[[list[torch.nn.Parameter]], Optimizer]


class Lion(Optimizer):
    """One that torch doesn't know, with its own kinds of state, in part made of random numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.history: list[int] = []

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.history.append(1)
        for group in self.param_groups:
            group["lr"] *= 0.5
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("momentum", torch.zeros_like(p, dtype=torch.float64))
                state.setdefault("noise", [torch.randn(3), np.random.rand(), random.random()])  # noqa: NPY002 — as used
                state["count"] = state.get("count", 0) + 1
                state["step"] = state.get("step", 0) + 1
                p.sub_(group["lr"] * (torch.sign(p.grad) + 1))


class Averaged(Optimizer):
    """Wraps another one and shares its groups, but has state of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups

    @override
    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["average"] = p.detach().clone()


class MasterWeights(Optimizer):
    """Float32 weights beside low-precision ones, with a momentum and weight decay."""

    def __init__(self, params: Any, decay_name: str = "weight_decay") -> None:
        super().__init__(params, {"lr": 0.1, decay_name: 0.01})
        self.decay_name = decay_name

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float().clone()
                    state["momentum"] = torch.zeros_like(state["master"])
                gradient = p.grad.float() + group[self.decay_name] * state["master"]
                state["momentum"].mul_(0.9).add_(gradient)
                state["master"].sub_(group["lr"] * state["momentum"])
                p.copy_(state["master"])


class Holder:
    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


ADAM, ADAMW, RMSPROP = torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop

KINDS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd-momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd-fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: ADAM(p, lr=0.1),
    "adam-tensor-lr": lambda p: ADAM(p, lr=torch.tensor(0.1)),
    "adamw-amsgrad-foreach": lambda p: ADAMW(p, lr=0.1, amsgrad=True, foreach=True, maximize=True),
    "adamw-groups": lambda p: ADAMW([{"params": p[:1], "lr": 0.2}, {"params": p[1:], "amsgrad": True}]),
    "adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
    "rmsprop-centered-momentum": lambda p: RMSPROP(p, centered=True, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "unknown": Lion,
    "wrapping": lambda p: Averaged(ADAM(p)),
    "master-weights": MasterWeights,
}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(4, 3, generator=generator)),
        torch.nn.Parameter(torch.randn(5, generator=generator)),
        torch.nn.Parameter(torch.tensor(0.5)),
    ]


def shape_of(tree: Any) -> Any:
    def one(leaf: Any) -> Any:
        return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else type(leaf)

    return tree_map(one, tree)


def give_gradients(params: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def everything(optimizer: Optimizer, params: list[torch.nn.Parameter]) -> Any:
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    grads = [p.grad for p in params]
    numbers = [torch.get_rng_state(), random.getstate(), np.random.get_state()]  # noqa: NPY002 — what is kept
    others = {k: v for k, v in vars(optimizer).items() if k not in {"state", "param_groups", "optimizer"}}
    return copy.deepcopy(
        [[p.detach() for p in params], grads, groups, numbers, list(others), others.get("history")]
    )


def equal(a: Any, b: Any) -> bool:
    x, y = tree_leaves(a), tree_leaves(b)
    pairs = zip(x, y, strict=True)
    return all(torch.equal(i, j) if isinstance(i, torch.Tensor) else np.array_equal(i, j) for i, j in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_that_of_a_step(kind: str) -> None:
    primed, stepped = parameters(), parameters()
    optimizer, real = KINDS[kind](primed), KINDS[kind](stepped)
    assert prime_optimizer(optimizer) is optimizer
    give_gradients(stepped, 2)
    real.step()
    assert shape_of(optimizer.state_dict()) == shape_of(real.state_dict())
    if isinstance(optimizer, Averaged) and isinstance(real, Averaged):
        assert shape_of(optimizer.optimizer.state_dict()) == shape_of(real.optimizer.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_else_is_changed(kind: str) -> None:
    params = parameters()
    optimizer = KINDS[kind](params)
    give_gradients(params[:1], 3)
    held = [p.data_ptr() for p in params]
    before = everything(optimizer, params)
    prime_optimizer(optimizer)
    assert equal(everything(optimizer, params), before)
    assert held == [p.data_ptr() for p in params]
    assert [p.grad is None for p in params] == [False, True, True]


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"unknown"}))
def test_training_goes_on_as_without_it(kind: str) -> None:
    runs = []
    for primed in (True, False):
        params = parameters()
        optimizer = KINDS[kind](params)
        if primed:
            prime_optimizer(optimizer)
        for seed in range(3):
            give_gradients(params, seed)
            optimizer.step()
        runs.append([p.detach() for p in params])
    assert equal(*runs)


def test_state_that_is_there_stays() -> None:
    params = parameters()
    optimizer = ADAM(params)
    give_gradients(params[:2], 1)
    optimizer.step()
    before = copy.deepcopy(optimizer.state[params[0]])
    held = optimizer.state[params[0]]["exp_avg"]
    prime_optimizer(optimizer)
    assert equal(optimizer.state[params[0]], before)
    assert optimizer.state[params[0]]["exp_avg"] is held
    assert optimizer.state[params[2]]["step"] == 0


def test_schedule_and_hooks_see_no_step() -> None:
    params = parameters()
    optimizer = ADAM(params, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    calls: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    before = copy.deepcopy(schedule.state_dict())
    prime_optimizer(optimizer)
    assert not calls
    assert schedule.state_dict() == before
    # What torch warns of when a schedule steps before its optimizer.
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        schedule.step()


def test_wrapper_that_is_no_optimizer() -> None:
    inner = ADAM(parameters())
    outer = Holder(Holder(inner))
    assert prime_optimizer(outer) is outer
    assert len(inner.state) == 3


class Scaled(SGD):
    """As torch_xla.amp.syncfree's: with what the scaler found, a step makes other state than without it."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None, found_inf: torch.Tensor | None = None) -> Any:
        if found_inf is None:
            return super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"] = torch.zeros_like(found_inf)
        return None


class ThroughLock(SGD):
    """Has the parameters beside something that can't be copied, and changes them past torch's count of changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.context = {"lock": threading.Lock(), "params": [*self.param_groups[0]["params"]]}

    @override
    def step(self, closure: Any = None) -> Any:
        params: Any = self.context["params"]
        for p in params:
            p.data.mul_(0.9)
        return super().step(closure)


class Skipping(AdamW):
    """Leaves parameters alone whose gradients are zeros."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[-1]["params"]:
            if not p.grad.any():
                p.grad = None
        return super().step(closure)


def test_groups_without_momentum_have_no_state() -> None:
    params = parameters()
    groups: list[dict[str, Any]] = [{"params": params[:1], "momentum": 0.9}, {"params": params[1:]}]
    assert prime_optimizer(SGD(groups, lr=0.1)).state.keys() == {params[0]}


def test_sparse_gradients_without_state_of_a_step() -> None:
    table = torch.nn.Embedding(10, 3, sparse=True)
    assert not prime_optimizer(SGD(table.parameters(), lr=0.1)).state
    assert prime_optimizer(torch.optim.Adagrad(table.parameters())).state.keys() == {table.weight}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (torch.optim.LBFGS, r"LBFGS\.step\(\) failed.*'closure'"),
        (torch.optim.SparseAdam, r"SparseAdam\.step\(\) failed.*dense gradients"),
        (Scaled, r"Scaled\.step\(\) makes other state with a found_inf than without one"),
        (lambda _: Holder(3), "int isn't a torch.optim.Optimizer"),
        (
            lambda p: MasterWeights(p, decay_name="shrink"),
            r"MasterWeights's state\['master'\] of a parameter of shape \(4, 3\)",
        ),
        (ThroughLock, r"ThroughLock\.context can't be copied"),
        (Skipping, r"Skipping\.step\(\) made no state for 3 of 3 parameters"),
        (lambda p: Skipping([{"params": p[:1]}, {"params": p[1:]}]), "made no state for 2 of 3 parameters"),
    ],
)
def test_refused(make: Callable[[Any], object], match: str) -> None:
    params = parameters()
    optimizer = make(params)
    with pytest.raises(PrimeError, match=match):
        prime_optimizer(optimizer)
    assert not getattr(optimizer, "state", None)
    assert equal([p.detach() for p in params], [p.detach() for p in parameters()])
