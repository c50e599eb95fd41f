"""Ways around the copy of the optimizer, to the training's own parameters, hooks and state."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from typing_extensions import override

from stepkeeper_planners import prime_optimizer
from stepkeeper_planners.errors import PrimeError

GLOBAL: list[torch.nn.Parameter] = []


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


class ThroughGlobal(SGD):
    """Nothing of the optimizer leads to what its step changes."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in GLOBAL:
            p.mul_(0.9)
        raise RuntimeError("and it fails")


class HoldsModel(SGD):
    """Can be copied, with what can't."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)
        self.model, self.lock = model, threading.Lock()

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with self.lock:
            for p in self.model.parameters():
                p.clamp_(-0.01, 0.01)
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


def weights() -> list[torch.nn.Parameter]:
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.full((2, 2), 3.0))]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (ThroughLock, r"ThroughLock\.context can't be copied"),
        (lambda p: ThroughGlobal(p, lr=0.1), "changed 2 parameters.*set back"),
    ],
)
def test_step_that_reaches_the_real_parameters(make: Callable[[Any], Optimizer], match: str) -> None:
    params = weights()
    GLOBAL[:] = params
    optimizer = make(params)
    with pytest.raises(PrimeError, match=match):
        prime_optimizer(optimizer)
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(params, weights(), strict=True))


def test_model_in_the_optimizer() -> None:
    model = torch.nn.Linear(3, 3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = prime_optimizer(HoldsModel(model))
    assert optimizer.state.keys() == set(model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        (lambda p: p, r"Skipping\.step\(\) made no state for 2 of 2 parameters"),
        (lambda p: [{"params": p[:1]}, {"params": p[1:]}], "made no state for 1 of 2 parameters"),
    ],
)
def test_parameters_without_state_are_refused(groups: Callable[[Any], Any], match: str) -> None:
    optimizer = Skipping(groups(weights()))
    with pytest.raises(PrimeError, match=match):
        prime_optimizer(optimizer)
    assert not optimizer.state


def test_groups_without_momentum_have_no_state() -> None:
    params = weights()
    groups: list[dict[str, Any]] = [{"params": params[:1], "momentum": 0.9}, {"params": params[1:]}]
    assert prime_optimizer(SGD(groups, lr=0.1)).state.keys() == {params[0]}


def test_sparse_gradients_without_state_of_a_step() -> None:
    table = torch.nn.Embedding(10, 3, sparse=True)
    assert not prime_optimizer(SGD(table.parameters(), lr=0.1)).state
    assert prime_optimizer(torch.optim.Adagrad(table.parameters())).state.keys() == {table.weight}
