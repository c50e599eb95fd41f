"""A state that is gathered once more: the same as if it never had been, whatever has changed in it."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepkeeper_planners import adapters
from stepkeeper_planners.errors import DuplicateNameError
from stepkeeper_planners.state.gatherer import Gathered, Gatherer
from stepkeeper_planners.state.nesting import notes
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.tree import gather_state

TENSOR = torch.arange(12.0).reshape(3, 4)


class Part:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def first() -> dict[str, Any]:
    """Anew each time, with leaves of all kinds."""
    tied = TENSOR.clone()
    return {
        "model": OrderedDict(w=TENSOR.clone(), b=torch.nn.Parameter(torch.ones(2)), n=torch.tensor(3)),
        "optimizer": {
            "state": {0: {"m": TENSOR.clone(), "step": 3.0}, 1: {"m": torch.ones(2), "step": 3.0}},
            "param_groups": [{"lr": 0.1, "params": [0, 1], "betas": (0.9, 0.999)}],
        },
        "tied": {"a": tied, "b": tied, "view": tied[:2]},
        "without elements": {"a": torch.empty(0), "b": torch.empty(0)},
        "empty": {},
        "own": PerRank({"at": 3}),
    }


def same(again: Gathered, state: dict[str, Any]) -> bool:
    """Whether it is what a first look at the state gives."""
    fresh = gather_state(state)
    flat = again.flat
    assert [*flat.tensors] == [*fresh.tensors]
    assert all(flat.tensors[name] is fresh.tensors[name] for name in fresh.tensors)
    assert (flat.values, flat.aliases, flat.paths) == (fresh.values, fresh.aliases, fresh.paths)
    assert (flat.per_rank, flat.resizers) == (fresh.per_rank, fresh.resizers)
    assert again.build.key_paths == fresh.paths | notes(fresh.tree)
    structures = [(name, adapters.structure(tensor)) for name, tensor in fresh.tensors.items()]
    return list(again.build.structures) == structures


def test_what_is_built_alike_shares_a_build_and_has_its_own_leaves() -> None:
    gatherer = Gatherer()
    build = gatherer.gather(first()).build
    state = first()
    state["optimizer"]["state"][0]["step"] = 4.0
    state["own"] = PerRank({"at": 4}, lambda values, _ranks: values[0])
    again = gatherer.gather(state)
    assert again.build is build
    assert same(again, state)
    assert again.flat.values["optimizer.state.0.step"] == 4.0
    assert again.flat.per_rank == {"own": {"at": 4}}


def _set(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        node: Any = state
        for key in keys[:-1]:
            node = node[key]
        node[keys[-1]] = value

    return change


def _named(state: dict[str, Any]) -> None:
    state["model"]["w"].mine = 1


def _swapped(state: dict[str, Any]) -> None:
    state["model"]["b"].data = torch.ones(2, dtype=torch.float64)


def _turned(state: dict[str, Any]) -> None:
    state["tied"] = dict(reversed(state["tied"].items()))


@pytest.mark.parametrize(
    "change",
    [
        _set("model", "w", value=torch.ones(4, 3)),
        _set("model", "w", value=torch.ones(3, 4, dtype=torch.float64)),
        _set("model", "w", value=1.0),
        _set("model", "more", value=torch.ones(1)),
        _set("model", "n", value={}),
        _set("optimizer", "state", 0, "step", value=torch.tensor(3.0)),
        _set("optimizer", "state", 0, value={}),
        _set("optimizer", "state", value={0: {"m": TENSOR.clone(), "step": 3.0}}),
        _set(
            "optimizer",
            "state",
            value={"0": {"m": TENSOR.clone(), "step": 3.0}, 1: {"m": TENSOR, "step": 3.0}},
        ),
        _set("optimizer", "param_groups", 0, "params", value=[0, 1, torch.ones(1)]),
        _set("optimizer", "param_groups", value=[]),
        _set("tied", "b", value=TENSOR.clone()),
        _set("own", value={"at": 3}),
        _set("empty", value={"a": {}}),
        _set("empty", value=3),
        _named,
        _swapped,
        _turned,
    ],
)
def test_what_is_built_otherwise_is_noticed(change: Callable[[dict[str, Any]], None]) -> None:
    gatherer = Gatherer()
    build = gatherer.gather(first()).build
    state = first()
    change(state)
    again = gatherer.gather(state)
    assert again.build is not build
    assert same(again, state)
    state = first()
    assert same(gatherer.gather(state), state)


def test_tensors_that_come_to_be_one_and_part_again() -> None:
    gatherer = Gatherer()
    one, other = torch.ones(2), torch.ones(2)
    for state in ({"a": one, "b": other}, {"a": one, "b": one}, {"a": other, "b": one}, {"b": one, "a": one}):
        assert same(gatherer.gather(state), state)
    lazily = torch.ones(2, dtype=torch.complex64)
    for state in ({"a": lazily, "b": lazily}, {"a": lazily, "b": lazily.conj()}):
        assert same(gatherer.gather(state), state)


def test_the_same_lists_of_keys_may_be_another_nesting() -> None:
    gatherer = Gatherer()
    inner, empty = {"a": 1, "b": 2}, dict[str, Any]()
    for state in (
        {"x": inner, "y": empty, "z": empty},
        {"x": {"a": empty, "b": empty}, "y": 1, "z": 2},
        {"x": [empty, empty], "y": 1, "z": 2},
        {"x": inner, "q": {"c": empty, "d": empty}},
        {"x": {"a": {"c": 1, "d": 2}, "b": empty}, "q": empty},
        {1: 1, 2: 2},
        {True: 1, 2: 2},
    ):
        assert same(gatherer.gather(state), state)  # type: ignore[arg-type]  # keys that stock makes texts of


def test_the_state_of_an_object_is_asked_for_once_each_time() -> None:
    gatherer, part = Gatherer(), Part({"w": torch.ones(2)})
    for calls in range(1, 4):
        gatherer.gather({"part": part})
        assert part.calls == calls
        part.state["w"] = torch.ones(calls)


def test_a_state_that_is_refused_is_not_remembered() -> None:
    gatherer = Gatherer()
    state = {"a": {"b": torch.ones(1)}}
    gatherer.gather(state)
    with pytest.raises(DuplicateNameError):
        gatherer.gather({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    assert same(gatherer.gather(state), state)


def test_tensors_that_are_not_stored_are_gathered_again_and_again() -> None:
    gatherer = Gatherer()
    for _ in range(3):
        state = {"sparse": torch.eye(2).to_sparse(), "meta": torch.ones(2, device="meta")}
        assert same(gatherer.gather(state), state)
