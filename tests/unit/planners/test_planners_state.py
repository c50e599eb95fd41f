"""A nested state, flat and back, with the names that torch.distributed.checkpoint gives."""

import random
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from stepkeeper_planners.errors import DuplicateNameError, UnsupportedValueError
from stepkeeper_planners.state import gather_state, scatter_state


class Counter:
    """What a user's own object with a state looks like."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "by": {1: [torch.full((2,), float(self.count)), 5], "x": (1, 2)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self.count = state["count"]
        self.loaded = state


def trained(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(steps)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


def test_names_are_those_of_stock() -> None:
    model, optimizer, schedule = trained(2)
    state: dict[Any, Any] = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "schedule": schedule.state_dict(),
        "lists": [[1, 2], [torch.ones(1)], [], [{"a": 1}], ["x"]],
        "plain": [1, [2, 3]],
        "tuple": (torch.ones(1), {"b": 2}),
        "empty": {},
        "rng": {"python": random.getstate(), "numpy": np.random.RandomState(0).get_state()},
        7: {8: 9},
    }
    flat = gather_state(state)
    names, paths = flatten_state_dict(state)
    assert [*flat.tensors, *flat.values] != []
    assert set(flat.tensors) | set(flat.values) == set(names)
    assert flat.paths == paths
    assert set(flat.tensors) == {name for name, leaf in names.items() if isinstance(leaf, torch.Tensor)}


def test_objects_get_back_what_they_gave() -> None:
    model, optimizer, schedule = trained(3)
    fresh_model, fresh_optimizer, fresh_schedule = trained(1)
    saved = gather_state({"m": model, "deep": {"o": optimizer, "list": [schedule, 1]}, "c": Counter(4)})
    counter = Counter(0)
    state = {"m": fresh_model, "deep": {"o": fresh_optimizer, "list": [fresh_schedule, 0]}, "c": counter}
    flat = gather_state(state)
    assert flat.tensors.keys() == saved.tensors.keys()
    for name, tensor in flat.tensors.items():
        tensor.copy_(saved.tensors[name])
    scatter_state(state, flat, saved.values)
    torch.testing.assert_close(fresh_model.state_dict(), model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(fresh_optimizer.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    assert fresh_schedule.state_dict() == schedule.state_dict()
    assert state["deep"]["list"][1] == 1  # type: ignore[index]  # a tree of unlike values
    assert (counter.count, counter.loads) == (4, 1)
    assert counter.loaded["by"]["x"] == (1, 2)
    # A number as key came back as a number, a tensor that state_dict() made anew came filled.
    assert torch.equal(counter.loaded["by"][1][0], torch.full((2,), 4.0))


def test_values_go_into_dicts_and_lists_in_place() -> None:
    inner = {"seed": 1, "names": ["a"], "row": np.arange(2)}
    items = [{"n": 1}, 2]
    state: dict[str, Any] = {"inner": inner, "items": items, "step": 3, "kept": 4}
    flat = gather_state(state)
    scatter_state(
        state, flat, {"inner.seed": 10, "inner.names": ["b", "c"], "items.0.n": 11, "items.1": 12, "step": 13}
    )
    assert inner["seed"] == 10
    assert inner["names"] == ["b", "c"]
    assert items == [{"n": 11}, 12]
    assert (state["step"], state["kept"]) == (13, 4)


def test_tied_tensors_stand_once() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3), "b": torch.nn.Linear(2, 3)})
    model["a"].weight = model["b"].weight = weight
    flat = gather_state(
        {"m": model, "view": weight[0], "turned": weight.t(), "e": torch.empty(0), "f": torch.empty(0)}
    )
    assert flat.aliases == {"m.b.weight": "m.a.weight"}
    assert set(flat.tensors) == {"m.a.weight", "m.a.bias", "m.b.bias", "view", "turned", "e", "f"}


def test_module_state_keeps_its_versions() -> None:
    model, *_ = trained(1)
    flat = gather_state({"m": model})
    assert isinstance(flat.tree["m"], OrderedDict)
    assert flat.tree["m"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]  # torch sets it


def test_two_entries_of_one_name_are_refused() -> None:
    with pytest.raises(DuplicateNameError, match=r"a\.b"):
        gather_state({"a": {"b": 1}, "a.b": 2})


def test_a_container_that_cant_be_changed_is_named() -> None:
    state = {"frozen": MappingProxyType({"x": 1})}
    flat = gather_state(state)
    with pytest.raises(UnsupportedValueError, match=r"frozen\.x.*mappingproxy"):
        scatter_state(state, flat, {"frozen.x": 2})


def test_a_state_that_holds_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["me"] = state
    with pytest.raises(UnsupportedValueError, match="holding itself"):
        gather_state(state)
