"""An optimizer continues with what a load has filled; its parameters have the names of the modules of its state."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planners_parts.one_process import Net, load_state, p, same, save_state
from torch import nn
from torch.optim import ASGD, SGD, AdamW, NAdam, Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from stepkeeper_planners import PerRank, prime_optimizer
from stepkeeper_planners.errors import DuplicateNameError
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
        for each in optimizer.param_groups[0]["params"]:
            each.grad = torch.randn(each.shape, generator=generator).to(each.dtype)
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


def test_names_are_those_of_the_modules_in_the_state() -> None:
    def keys(optimizer: Optimizer, **state: object) -> list[str]:
        found: list[str] = flatten_state({**state, "o": optimizer}).values["o.param_groups.0.params"]  # type: ignore[assignment]
        return found

    net, other, loose = Net(), Net(), nn.Parameter(torch.ones(2, 3))
    both = [net.a.weight, other.a.weight, loose]
    assert keys(AdamW(both), x={"net": net}, y=[other]) == ["x.net.a.weight", "y.0.a.weight", "#2(2,3)"]
    assert keys(AdamW(both), x=PerRank(net)) == ["a.weight", "#1(3,3)", "#2(2,3)"]
    # A part of a module, or a module and its wrapper, are no two modules.
    assert keys(AdamW(p(net, "ab")), head=net.a, model=net) == ["a.weight", "b.weight"]
    assert keys(AdamW(p(net, "a")), head=net.a, model=net) == ["a.weight"]
    assert keys(AdamW(p(net, "ab")), a=net, ema=AveragedModel(net), wrapped=torch.compile(net)) == [
        "a.weight",
        "b.weight",
    ]
    # Dots in keys may give two modules one name.
    dotted: dict[str, Any] = {"m.n": net.a, "m": {"n": net}}
    assert keys(AdamW(p(net, "d")), **dotted) == ["d.weight"]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        twice = AdamW([net.a.weight, net.a.weight])
    assert list(map(str, keys(twice, net=net))) == ["1", "1"]
    # Names that were given are taken where no module has the parameter, if they tell it apart.
    assert keys(AdamW([("n", loose), ("m", net.a.weight)])) == ["n", "m"]
    assert keys(AdamW([("a.weight", loose), ("m", net.a.weight)]), net=net) == ["#0(2,3)", "#1(3,3)"]
    appended = AdamW([("n", loose)])
    appended.param_groups[0]["params"].append(nn.Parameter(torch.ones(4)))
    assert keys(appended) == ["#0(2,3)", "#1(4)"]
    net.b.weight = net.a.weight
    assert keys(AdamW(net.parameters()), net=net) == ["a.weight", "c.weight", "d.weight"]
    optimizer = AdamW(net.parameters())
    optimizer.state.update({"a.weight": {"mine": 1}})  # type: ignore[dict-item]
    prime_optimizer(optimizer)
    with pytest.raises(DuplicateNameError, match=r"a\.weight: a parameter has the same name"):
        flatten_state({"net": net, "o": optimizer})
