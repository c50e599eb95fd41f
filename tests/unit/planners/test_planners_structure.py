"""A state that is gathered once more: the same as if it never had been, whatever has changed in it."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from stepkeeper_planners import adapters
from stepkeeper_planners.state.nesting import encode_nesting
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.structure import LookUpResult, StructureCache
from stepkeeper_planners.state.tree import FlatState, flatten_state
from stepkeeper_planners.state.values import estimate_value_bytes

TENSOR = torch.arange(12.0).reshape(3, 4)


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


Derived = dict[str, Any]


def derive(flat: FlatState, value_bytes: Mapping[str, int]) -> Derived:
    """All that a plan may go by."""
    return {
        "structures": [(name, adapters.structure(tensor)) for name, tensor in flat.tensors.items()],
        "key paths": flat.paths | encode_nesting(flat.tree),
        "value bytes": dict(value_bytes),
    }


def same(
    again: LookUpResult[Derived], state: dict[str, Any], *, large_value_bytes: int | None = None
) -> bool:
    """Return True if it is what a first look at the state gives."""
    fresh = flatten_state(state)
    flat = again.flat
    assert [*flat.tensors] == [*fresh.tensors]
    assert all(flat.tensors[name] is fresh.tensors[name] for name in fresh.tensors)
    assert (flat.values, flat.aliases, flat.paths) == (fresh.values, fresh.aliases, fresh.paths)
    assert (flat.per_rank, flat.resizers) == (fresh.per_rank, fresh.resizers)
    limit = sys.maxsize if large_value_bytes is None else large_value_bytes
    sizes = {name: estimate_value_bytes(value) for name, value in fresh.values.items()}
    return again.derived == derive(
        fresh, {name: size if size >= limit else 0 for name, size in sizes.items()}
    )


def test_what_is_built_alike_shares_what_was_derived_and_has_its_own_leaves() -> None:
    cache = StructureCache(derive)
    derived = cache.look_up(first()).derived
    state = first()
    state["optimizer"]["state"][0]["step"] = 4.0
    state["own"] = PerRank({"at": 4}, lambda values, _ranks: values[0])
    again = cache.look_up(state)
    assert again.derived is derived
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
        _set("model", "w", value=1.0),
        _set("model", "more", value=torch.ones(1)),
        _set("optimizer", "state", 0, value={}),
        _set(
            "optimizer",
            "state",
            value={"0": {"m": TENSOR.clone(), "step": 3.0}, 1: {"m": TENSOR, "step": 3.0}},
        ),
        _set("optimizer", "param_groups", 0, "params", value=[0, 1, torch.ones(1)]),
        _set("tied", "b", value=TENSOR.clone()),
        _set("own", value={"at": 3}),
        _set("empty", value={"a": {}}),
        _named,
        _swapped,
        _turned,
    ],
)
def test_what_is_built_otherwise_is_noticed(change: Callable[[dict[str, Any]], None]) -> None:
    cache = StructureCache(derive)
    derived = cache.look_up(first()).derived
    state = first()
    change(state)
    again = cache.look_up(state)
    assert again.derived is not derived
    assert same(again, state)
    state = first()
    assert same(cache.look_up(state), state)


def test_tensors_that_come_to_be_one_and_part_again() -> None:
    cache = StructureCache(derive)
    one, other = torch.ones(2), torch.ones(2)
    for state in ({"a": one, "b": other}, {"a": one, "b": one}, {"a": other, "b": one}, {"b": one, "a": one}):
        assert same(cache.look_up(state), state)
    lazily = torch.ones(2, dtype=torch.complex64)
    for state in ({"a": lazily, "b": lazily}, {"a": lazily, "b": lazily.conj()}):
        assert same(cache.look_up(state), state)


def test_the_same_lists_of_keys_may_be_another_nesting() -> None:
    cache = StructureCache(derive)
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
        assert same(cache.look_up(state), state)  # type: ignore[arg-type]  # keys that stock makes texts of


def test_a_value_of_another_class_is_no_other_structure_and_a_tensor_or_own_value_is() -> None:
    cache = StructureCache(derive)
    state: dict[str, Any] = {"w": torch.ones(2), "best": None, "own": PerRank(1)}
    derived = cache.look_up(state).derived
    for best in (0.5, None, "x", 3, 3):
        again = cache.look_up({**state, "best": best})
        assert again.derived is derived
        assert same(again, {**state, "best": best})
    others: list[dict[str, Any]] = [{"best": torch.ones(1)}, {"best": PerRank(2)}, {"own": 1}, {"w": 1.0}]
    for changed in others:
        again = cache.look_up(state | changed)
        assert again.derived is not derived
        assert same(again, state | changed)
        derived = cache.look_up(state).derived


def test_large_values_are_part_of_the_structure_by_their_size() -> None:
    cache = StructureCache(derive, large_value_bytes=100)
    derived = cache.look_up({"text": "x", "w": torch.ones(1)}).derived
    assert derived["value bytes"] == {"text": 0}
    assert cache.look_up({"text": "x" * 99, "w": torch.ones(1)}).derived is derived
    for size, counted in ((100, 128), (129, 256), (257, 512)):
        again = cache.look_up({"text": "x" * size, "w": torch.ones(1)})
        assert again.derived is not derived
        assert again.derived["value bytes"] == {"text": counted}
        # A value that grows a little from save to save is of the same structure.
        assert cache.look_up({"text": "x" * counted, "w": torch.ones(1)}).derived is again.derived
        derived = again.derived
    assert cache.look_up({"text": "y" * 500, "w": torch.zeros(1)}).derived is derived


def test_what_was_refused_when_it_was_derived_is_not_held() -> None:
    refusals: list[Exception] = [ValueError("no")]

    def refuse_once(flat: FlatState, value_bytes: Mapping[str, int]) -> Derived:
        if refusals:
            raise refusals.pop()
        return derive(flat, value_bytes)

    cache = StructureCache(refuse_once)
    state = {"w": torch.ones(1)}
    with pytest.raises(ValueError, match="no"):
        cache.look_up(state)
    assert same(cache.look_up(state), state)
