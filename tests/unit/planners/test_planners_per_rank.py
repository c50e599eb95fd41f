"""Test each rank's own values: stored beside the state, restored, made anew for another number of ranks."""

from typing import Any

import pytest

from stepkeeper_planners.errors import DuplicateNameError
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.state.filling import fill_state
from stepkeeper_planners.state.per_rank import (
    PerRank,
    parse_stored_name,
    stored_name,
)
from stepkeeper_planners.state.tree import flatten_state

TWO = Ranks(rank=1, world_size=2)


class Loader:
    """A data loader with a state."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "seen": [self.place]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Worker:
    """An object that marks a part of its state itself."""

    def __init__(self, own: int) -> None:
        self.own = own

    def state_dict(self) -> dict[str, Any]:
        return {"own": PerRank(self.own), "shared": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state["own"]


def test_what_is_in_a_box_is_no_value_of_the_state() -> None:
    state = {"a": PerRank(Loader(3)), "deep": {"list": [PerRank(5), 1]}, "w": Worker(7), "step": 1}
    flat = flatten_state(state)
    assert flat.per_rank == {"a": {"place": 3, "seen": [3]}, "deep.list.0": 5, "w.own": 7}
    assert flat.values == {"deep.list.1": 1, "w.shared": 1, "step": 1}
    assert set(flat.paths) == set(flat.values)
    assert flat.resizers == dict.fromkeys(flat.per_rank)


def test_it_comes_back_in_place() -> None:
    saved = flatten_state({"a": PerRank(Loader(3)), "deep": [PerRank(5)], "w": Worker(7)})
    loader, box, worker = Loader(0), PerRank(None), Worker(0)
    state = {"a": PerRank(loader), "deep": [box], "w": worker}
    fill_state(state, flatten_state(state), saved.per_rank)
    assert (loader.place, box.value, worker.own) == (3, 5, 7)
    assert state["a"].value is loader  # type: ignore[attr-defined]  # a tree of unlike values


def test_stored_names_are_read_as_they_were_made() -> None:
    for fqn in ("a", "a.b", "", "x@1/2", "new\nline"):
        assert parse_stored_name(stored_name(fqn, TWO)) == (fqn, 1, 2)
    for name in ("a", "a@1", "a@2/2", "a@01/2", "a@1/02", "a@-1/2", "a@0/0", "a@1/2 "):
        assert parse_stored_name(name) is None


def test_an_entry_with_the_name_of_a_stored_one_is_refused() -> None:
    with pytest.raises(DuplicateNameError, match=r"a@0/2.*'a' of rank 0"):
        flatten_state({"a": PerRank(1), "a@0/2": 1})
    assert flatten_state({"b": PerRank(1), "a@0/2": 1}).values == {"a@0/2": 1}
