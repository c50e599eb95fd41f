"""An optimizer goes on with what a load has filled; keys that are numbers come back as numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planners_parts.one_process import load_state, same, save_state
from torch.optim import ASGD, SGD, AdamW, NAdam, Optimizer
from typing_extensions import override

from stepkeeper_planners import prime_optimizer
from stepkeeper_planners.state.filling import finish_load
from stepkeeper_planners.state.tree import flatten_state


class Wrapper(Optimizer):
    """Wrap an optimizer as Accelerate and Lookahead do: it never calls Optimizer.__init__()."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    @override
    def param_groups(self) -> Any:  # type: ignore[override]  # an attribute of Optimizer
        return self.optimizer.param_groups

    @override
    def step(self, closure: Any = None) -> Any:
        self.optimizer.step()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def trained(optimizer: Optimizer, steps: int) -> Optimizer:
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
    return optimizer


def weights() -> list[torch.nn.Parameter]:
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    return [torch.nn.Parameter(values.to(torch.bfloat16))]


def load_from(source: Optimizer, target: Optimizer) -> None:
    """Fill the target's tensors with the source's, and set its numbers, as a restore does."""
    flat, stored = flatten_state({"o": target}), flatten_state({"o": source})
    for name, tensor in flat.tensors.items():
        tensor.copy_(stored.tensors[name])
    finish_load({"o": target}, flat, stored.values)


@pytest.mark.parametrize("make", [NAdam, ASGD, AdamW, lambda p: Wrapper(AdamW(p))])
def test_training_goes_on_to_the_bit(make: Callable[[Any], Optimizer]) -> None:
    first, second = weights(), weights()
    undisturbed = trained(make(first), 3)
    resumed = make(second)
    prime_optimizer(resumed.optimizer if isinstance(resumed, Wrapper) else resumed)
    with torch.no_grad():
        second[0].copy_(first[0])
    load_from(undisturbed, resumed)
    trained(undisturbed, 4)
    trained(resumed, 4)
    assert torch.equal(first[0], second[0])


def test_a_hook_says_what_the_state_is_after_a_load() -> None:
    optimizer = prime_optimizer(SGD(weights(), lr=0.1, momentum=0.9))
    (parameter,) = optimizer.param_groups[0]["params"]
    mine = torch.ones(5, 3)
    optimizer.register_load_state_dict_post_hook(lambda it: it.state[parameter].update(momentum_buffer=mine))
    load_from(optimizer, optimizer)
    assert optimizer.state[parameter]["momentum_buffer"] is mine


def stepped() -> torch.optim.AdamW:
    weights: list[torch.Tensor] = [torch.nn.Parameter(torch.arange(4.0) + i) for i in range(3)]
    groups: list[dict[str, Any]] = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.25)
    for _ in range(2):
        torch.autograd.backward(torch.cat(weights).pow(2).sum())
        optimizer.step()
    return optimizer


def zeroed(optimizer: torch.optim.AdamW) -> torch.optim.AdamW:
    for tensors in optimizer.state.values():
        for tensor in tensors.values():
            tensor.zero_()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


@pytest.mark.parametrize("saved_as", ["object", "dict"])
@pytest.mark.parametrize("loaded_as", ["object", "dict"])
def test_an_optimizers_state_there_and_back(saved_as: str, loaded_as: str, tmp_path: Path) -> None:
    wanted = stepped()
    folder = save_state({"optim": wanted if saved_as == "object" else wanted.state_dict()}, tmp_path / "c")
    optimizer = zeroed(stepped())
    state = {"optim": optimizer if loaded_as == "object" else optimizer.state_dict()}
    load_state(state, folder)
    if loaded_as == "dict":
        loaded: Any = state["optim"]
        assert list(loaded["state"]) == [0, 1, 2]
        optimizer.load_state_dict(loaded)
    same(optimizer.state_dict(), wanted.state_dict())
