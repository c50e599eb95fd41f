"""Test that what subclasses of torch's planners override is called of ours too: one class body, on either."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from typing_extensions import override

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner


def saving(base: Any, **arguments: Any) -> Any:
    class Saving(base):  # type: ignore[misc]  # the one class or the other
        """Saves another step, and tensors of floats doubled."""

        def __init__(self) -> None:
            super().__init__(**arguments)
            self.looked_up: list[str] = []
            self.transformed: list[str] = []

        def lookup_object(self, index: Any) -> Any:
            self.looked_up.append(index.fqn)
            found = super().lookup_object(index)
            return found + 1 if index.fqn == "step" else found

        def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 — torch's name
            self.transformed.append(write_item.index.fqn)
            doubled = isinstance(object, torch.Tensor) and object.is_floating_point()
            return super().transform_object(write_item, object * 2 if doubled else object)

    return Saving()


def loading(base: Any, **arguments: Any) -> Any:
    class Loading(base):  # type: ignore[misc]  # the one class or the other
        """Loads `aside` into a tensor of its own, and `turned` from its last element to its first."""

        def __init__(self) -> None:
            super().__init__(**arguments)
            self.asked: list[tuple[str, str]] = []
            self.own = torch.zeros(3)

        def lookup_tensor(self, index: Any) -> torch.Tensor:
            self.asked.append(("lookup", index.fqn))
            found: torch.Tensor = super().lookup_tensor(index)
            return self.own if index.fqn == "aside" else found

        def transform_tensor(self, read_item: Any, tensor: torch.Tensor) -> torch.Tensor:
            name = read_item.dest_index.fqn
            self.asked.append(("transform", name))
            part: torch.Tensor = super().transform_tensor(read_item, tensor)
            if name == "turned":
                self.turned = torch.zeros_like(part)
                return self.turned
            return part

    return Loading()


def make_state(start: int) -> dict[str, Any]:
    state: dict[str, Any] = {name: torch.arange(3.0) + start for name in ("plain", "aside", "turned")}
    return state | {
        "whole": torch.arange(3) + start,
        "nested": {"w": torch.ones(2, 2) * start},
        "step": start,
    }


@pytest.mark.parametrize("base", [DefaultSavePlanner, SPMDSavePlanner])
def test_what_is_saved_goes_through_a_subclass(base: Any, tmp_path: Path) -> None:
    planner = saving(base)
    dcp_save(make_state(1), checkpoint_id=tmp_path, planner=planner, no_dist=True)
    names = ["aside", "nested.w", "plain", "step", "turned", "whole"]
    assert sorted(planner.looked_up) == sorted(planner.transformed) == names
    loaded = make_state(50)
    dcp_load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["plain"], torch.tensor([2.0, 4.0, 6.0]))
    assert torch.equal(loaded["nested"]["w"], torch.ones(2, 2) * 2)
    assert torch.equal(loaded["whole"], torch.tensor([1, 2, 3]))
    assert loaded["step"] == 2


@pytest.mark.parametrize("base", [DefaultLoadPlanner, SPMDLoadPlanner])
def test_what_is_loaded_goes_through_a_subclass(base: Any, tmp_path: Path) -> None:
    dcp_save(make_state(1), checkpoint_id=tmp_path, no_dist=True)
    state, planner = make_state(50), loading(base)
    dcp_load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    names = ["aside", "nested.w", "plain", "turned", "whole"]
    assert sorted(planner.asked) == [(hook, name) for hook in ("lookup", "transform") for name in names]
    for name in ("plain", "whole"):
        assert torch.equal(state[name], make_state(1)[name])
    assert torch.equal(planner.own, torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(planner.turned, torch.tensor([1.0, 2.0, 3.0]))
    for name in ("aside", "turned"):
        assert torch.equal(state[name], make_state(50)[name])
    assert state["step"] == 1


def test_elements_that_are_converted_or_divided_go_through_it_too(tmp_path: Path) -> None:
    dcp_save(make_state(1), checkpoint_id=tmp_path, no_dist=True)
    state: dict[str, Any] = {
        name: torch.full((3,), 9, dtype=torch.float64) for name in ("plain", "aside", "turned")
    }
    parts: Any = state["aside"]
    parts.global_shape, parts.local_sizes = (3,), ((1,), (2,))
    parts.global_offsets = parts.local_offsets = ((0,), (1,))
    planner = loading(SPMDLoadPlanner, strict=False, cast=True)
    dcp_load(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    assert torch.equal(state["plain"], torch.arange(3.0, dtype=torch.float64) + 1)
    # Where the subclass gave another place, the tensor has what it had.
    assert torch.equal(state["aside"], torch.full((3,), 9, dtype=torch.float64))
    assert planner.own.tolist() != [0, 0, 0]
    assert torch.equal(planner.turned, torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(state["turned"], torch.full((3,), 9, dtype=torch.float64))


class Kept(SPMDSavePlanner):
    """Has an argument, and something of its own."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    @override
    def transform_object(self, write_item: Any, object: Any) -> Any:
        changed = object * self.factor if isinstance(object, torch.Tensor) else object
        return super().transform_object(write_item, changed)


def test_a_subclass_arrives_in_another_process_as_what_it_is(tmp_path: Path) -> None:
    planner = pickle.loads(pickle.dumps(Kept(3)))
    assert type(planner) is Kept
    dcp_save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(tmp_path), planner=planner, no_dist=True)
    loaded = {"w": torch.zeros(2)}
    dcp_load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert loaded["w"].tolist() == [3.0, 3.0]
