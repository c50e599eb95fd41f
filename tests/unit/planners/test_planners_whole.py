"""Values that are saved with other items than the state had at the start, and states that are gathered once more."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from stepkeeper_planners import PerRank, RandomState, SPMDLoadPlanner, SPMDSavePlanner, SPMDStager, Whole
from stepkeeper_planners.errors import UnsupportedValueError
from stepkeeper_planners.state.structure import StructureCache
from stepkeeper_planners.state.tree import flatten_state


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


# Newer torch blames the module that calls it.
@pytest.mark.filterwarnings("ignore:torch.distributed is unavailable")
def test_stock_torch_reads_a_whole_as_one_value_under_its_name(tmp_path: Path) -> None:
    save(tmp_path, {"w": torch.ones(2), "t": {"log": Whole(HISTORY), "n": 1}})
    state: dict[str, Any] = {"w": torch.zeros(2), "t": {"log": None, "n": 0}}
    dcp_load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["t"] == {"log": HISTORY, "n": 1}
    assert _load_state_dict_from_keys(checkpoint_id=tmp_path)["t"]["log"] == HISTORY


def test_boxes_in_boxes() -> None:
    flat = flatten_state(
        {"own": PerRank({"log": Whole([1]), "deep": PerRank(2)}), "w": Whole({"v": Whole([3])})}
    )
    assert flat.per_rank == {"own": {"log": [1], "deep": 2}}
    assert flat.values == {"w": {"v": [3]}}
    with pytest.raises(UnsupportedValueError, match=r"w\.v: a PerRank can't be in a Whole"):
        flatten_state({"w": Whole({"v": PerRank(1)})})
    with pytest.raises(UnsupportedValueError, match="which is the same on all ranks"):
        flatten_state({"w": Whole(RandomState())})
    with pytest.raises(UnsupportedValueError, match="a Whole can't be in a tuple"):
        flatten_state({"w": (Whole(1),)})


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


def test_what_is_built_alike_shares_what_was_derived_and_has_its_own_leaves() -> None:
    def state(**changed: Any) -> dict[str, Any]:
        return {"w": torch.ones(4, 3), "text": "x" * 99, "step": 1, "own": PerRank(1), **changed}

    cache = StructureCache(lambda flat, _value_bytes: [*flat.tensors], large_value_bytes=100)
    derived = cache.look_up(state()).derived
    again = cache.look_up(state(step=None, own=PerRank(2), text="y"))
    assert again.derived is derived
    assert (again.flat.values["step"], again.flat.per_rank) == (None, {"own": 2})
    others: list[dict[str, Any]] = [
        {"w": torch.ones(3, 4)},
        {"step": torch.ones(1)},
        {"own": 1},
        {"text": "x" * 100},
    ]
    for changed in others:
        assert cache.look_up(state(**changed)).derived is not derived
        derived = cache.look_up(state()).derived


def test_a_staged_whole_stays_one(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "log": Whole([{"a": 1}])}
    staged = SPMDStager().stage(state)
    assert isinstance(state["log"], Whole)
    state["log"].value.append({"a": 2})  # type: ignore[attr-defined]
    assert list(flatten_state(staged).values) == ["log"]
    assert flatten_state(staged).values["log"] == [{"a": 1}]


def test_objects_in_a_whole_get_their_state_whatever_its_shape(tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.seen = {"acc": [1, 2], "more": {"x": 1}}
    save(tmp_path, {"m": Whole(metrics), "d": Whole({"inner": metrics, "n": 1})})
    again, inner = Metrics(), Metrics()
    load(tmp_path, {"m": Whole(again), "d": Whole({"inner": inner, "n": 0})})
    assert again.seen == inner.seen == metrics.seen
