"""Values that are saved with other items than the state had at the start, and states that are gathered once more."""

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from stepkeeper_planners import (
    PerRank,
    RandomState,
    SPMDLoadPlanner,
    SPMDSavePlanner,
    SPMDStager,
    Whole,
    adapters,
)
from stepkeeper_planners.errors import UnsupportedValueError
from stepkeeper_planners.state.nesting import encode_nesting
from stepkeeper_planners.state.structure import LookUpResult, StructureCache
from stepkeeper_planners.state.tree import FlatState, flatten_state
from stepkeeper_planners.state.values import estimate_value_bytes


def save(path: Path, state: dict[str, Any]) -> None:
    dcp_save(state, checkpoint_id=path, planner=SPMDSavePlanner(), no_dist=True)


def load(path: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp_load(state, checkpoint_id=path, planner=SPMDLoadPlanner(**options), no_dist=True)
    return state


class Metrics:
    """An object whose state gets keys."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.seen)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = dict(state)


HISTORY = [{"loss": 0.5, "step": 1}, {"loss": 0.25, "step": 2, "eval.acc": {"top": [1, 2], 5: {}}}, {}, 7]


SHAPES: dict[str, Any] = {
    "a list that grew": ([], HISTORY),
    "a list that shrank": (HISTORY, HISTORY[:1]),
    "a list that became empty": (HISTORY, []),
    "a dict that got keys": ({}, {"a": {"b": [1]}, 3: {}}),
    "a dict that lost keys": ({"a": 1, "b": {"c": 2}}, {"a": 2}),
    "None that became a dict": (None, {"best": 0.5}),
    "a dict that became None": ({"best": 0.5}, None),
    "a number that became a list": (0, [1, {"a": ()}]),
}


@pytest.mark.parametrize(("start", "saved"), SHAPES.values(), ids=SHAPES)
def test_a_whole_is_loaded_whatever_it_was_at_the_start(start: Any, saved: Any, tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2), "deep": [{"box": Whole(saved)}]})
    state = {"w": torch.zeros(2), "deep": [{"box": Whole(copy.deepcopy(start))}]}
    load(tmp_path, state)
    assert state["deep"][0]["box"].value == saved  # type: ignore[index]


def test_lists_and_dicts_stay_the_objects_that_the_training_holds(tmp_path: Path) -> None:
    history: list[Any] = []
    trainer: dict[str, Any] = {"log": history, "n": 0}
    save(tmp_path, {"t": Whole({"log": HISTORY, "n": 3, "new": [1]})})
    box = Whole(trainer)
    load(tmp_path, {"t": box})
    assert box.value is trainer
    assert trainer == {"log": HISTORY, "n": 3, "new": [1]}
    assert trainer["log"] is history


class Marked:
    """An object that marks a part of its state itself."""

    def __init__(self, history: list[Any]) -> None:
        self.history = history

    def state_dict(self) -> dict[str, Any]:
        return {"history": Whole(self.history), "n": len(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["n"] == len(state["history"])
        self.history = state["history"]


def test_an_object_may_mark_a_part_of_its_state(tmp_path: Path) -> None:
    # In a list: torch's dcp.load itself calls the objects that stand at the top.
    save(tmp_path / "whole", {"m": [Marked(HISTORY)]})
    marked = Marked([])
    load(tmp_path / "whole", {"m": [marked]})
    assert marked.history == HISTORY
    dcp_save({"m": [{"history": [{"a": 1}], "n": 1}]}, checkpoint_id=tmp_path / "opened", no_dist=True)
    load(tmp_path / "opened", {"m": [marked]})
    assert marked.history == [{"a": 1}]


def test_stock_torch_reads_a_whole_as_one_value_under_its_name(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2), "t": {"log": Whole(HISTORY), "n": 1}})
    state: dict[str, Any] = {"w": torch.zeros(2), "t": {"log": None, "n": 0}}
    dcp_load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["t"] == {"log": HISTORY, "n": 1}
    assert _load_state_dict_from_keys(checkpoint_id=tmp_path)["t"]["log"] == HISTORY


def test_a_staged_whole_stays_one(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "log": Whole([{"a": 1}])}
    staged = SPMDStager().stage(state)
    assert isinstance(state["log"], Whole)
    state["log"].value.append({"a": 2})  # type: ignore[attr-defined]
    assert list(flatten_state(staged).values) == ["log"]
    assert flatten_state(staged).values["log"] == [{"a": 1}]


def test_boxes_in_boxes() -> None:
    flat = flatten_state(
        {"own": PerRank({"log": Whole([1]), "deep": PerRank(2)}), "w": Whole({"v": Whole([3])})}
    )
    assert flat.per_rank == {"own": {"log": [1], "deep": 2}}
    assert flat.values == {"w": {"v": [3]}}
    with pytest.raises(
        UnsupportedValueError, match=r"w\.v: what each rank has of its own can't be in a Whole"
    ):
        flatten_state({"w": Whole({"v": PerRank(1)})})
    with pytest.raises(UnsupportedValueError, match="all ranks have alike"):
        flatten_state({"w": Whole(RandomState())})
    with pytest.raises(UnsupportedValueError, match="a Whole can't stand in a tuple"):
        flatten_state({"w": (Whole(1),)})


@pytest.mark.parametrize(
    ("start", "saved"),
    [
        ([], HISTORY),
        (HISTORY, []),
        ([1, 2], HISTORY),
        (HISTORY, [1]),
    ],
)
def test_lists_and_empty_dicts_need_no_mark(start: Any, saved: Any, tmp_path: Path) -> None:
    def build(value: Any) -> dict[str, Any]:
        return {"t": {"log": copy.deepcopy(value), "n": 1}, "w": torch.ones(1)}

    save(tmp_path, build(saved))
    state = build(start)
    held = state["t"]["log"]
    load(tmp_path, state)
    assert state == build(saved)
    assert held == saved, "it stays the object that the training holds"


@pytest.mark.parametrize(
    ("state", "stored", "said"),
    [
        ({"d": {"a": 1}}, {"d": {"a": 1, "b": 2}}, r"not in the state \(1\): d\.b"),
        ({"d": []}, {"d": {"a": 1}}, r"not in the checkpoint \(1\): d"),
        ({"d": Whole([])}, {"d": [torch.ones(1)]}, r"not in the checkpoint \(1\): d"),
        ({"o": [Metrics()]}, {"o": [{"x": 1}]}, r"not in the state \(1\): o\.0\.x"),
    ],
)
def test_what_differs_otherwise_is_still_refused(
    state: dict[str, Any], stored: dict[str, Any], said: str, tmp_path: Path
) -> None:
    save(tmp_path, stored)
    with pytest.raises(CheckpointException, match=said):
        load(tmp_path, state)


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
        _set(
            "optimizer",
            "state",
            value={"0": {"m": TENSOR.clone(), "step": 3.0}, 1: {"m": TENSOR, "step": 3.0}},
        ),
        _set("optimizer", "param_groups", 0, "params", value=[0, 1, torch.ones(1)]),
        _set("tied", "b", value=TENSOR.clone()),
        _set("own", value={"at": 3}),
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
