"""The names of an optimizer's parameters: those that the modules of the same state have for them."""

from typing import Any

import pytest
import torch
from planners_parts.one_process import Net, p
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel

from stepkeeper_planners import PerRank, prime_optimizer
from stepkeeper_planners.errors import DuplicateNameError
from stepkeeper_planners.state.tree import flatten_state


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
