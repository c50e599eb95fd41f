"""Both planners as torch.distributed.checkpoint drives them, for several ranks, and with what subclasses override."""

import pickle
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner, adapters
from stepkeeper_planners.errors import LostWritesError, UnsupportedWriterError, WrongRanksError
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.saving import planner as save_module
from stepkeeper_planners.saving.global_metadata import GlobalMetadata
from stepkeeper_planners.state.per_rank import PerRank


class PlannerGroup:
    """Planners of several ranks, whose plans go to the first and back as they would between processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *states: dict[str, Any]) -> None:
        self.planners = [SPMDSavePlanner() for _ in states]
        self.sent: list[bytes] = []
        for rank, (planner, state) in enumerate(zip(self.planners, states, strict=True)):
            ranks = Ranks(rank=rank, world_size=len(states))
            monkeypatch.setattr(save_module, "current_ranks", lambda _, ranks=ranks: ranks)
            planner.set_up_planner(state, is_coordinator=rank == 0)
            self.sent.append(pickle.dumps(planner.create_local_plan()))

    def agree(self) -> tuple[list[SavePlan], Metadata]:
        """The global plans as the coordinator's storage writer sees them, and the metadata."""
        return self.planners[0].create_global_plan([pickle.loads(plan) for plan in self.sent])

    def finish(self, storage_data: object = None) -> list[SavePlan]:
        plans, _ = self.agree()
        back = [pickle.loads(pickle.dumps(replace(plan, storage_data=storage_data))) for plan in plans]
        return [planner.finish_plan(plan) for planner, plan in zip(self.planners, back, strict=True)]


def names(items: list[WriteItem]) -> list[tuple[str, tuple[int, ...] | None]]:
    return [(item.index.fqn, item.index.offset and tuple(item.index.offset)) for item in items]


def replicated() -> dict[str, Any]:
    tied = torch.arange(60_000.0).reshape(600, 100)
    return {
        "a": tied,
        "b": torch.ones(3),
        "tied": tied,
        "empty": torch.empty(0, 2),
        "step": 3,
        "own": PerRank(1),
    }


def test_what_is_sent_is_a_mark_and_each_rank_has_its_items_again(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"layer{i}": torch.ones(5) for i in range(2000)}
    group = PlannerGroup(monkeypatch, state, state, state)
    assert max(map(len, group.sent)) < 1000
    seen, metadata = group.agree()
    assert len(pickle.dumps(seen[2])) < 1000
    finished = group.finish()
    written = sorted(name for plan in finished for name in names(plan.items))
    assert written == sorted((name, (0,)) for name in state)
    assert set(metadata.state_dict_metadata) == set(state)


def test_metadata_lists_ties_pieces_values_and_each_ranks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    group = PlannerGroup(monkeypatch, replicated(), replicated())
    _, metadata = group.agree()
    assert set(metadata.state_dict_metadata) == {"a", "b", "tied", "empty", "step", "own@0/2", "own@1/2"}
    big = metadata.state_dict_metadata["a"]
    assert isinstance(big, TensorStorageMetadata)
    assert [(tuple(c.offsets), tuple(c.sizes)) for c in big.chunks] == [
        ((0, 0), (300, 100)),
        ((300, 0), (300, 100)),
    ]
    assert metadata.planner_data["step"] == ("step",)
    first, second = (names(plan.items) for plan in group.finish())
    assert ("step", None) in first
    assert ("own@0/2", None) in first
    assert ("own@1/2", None) in second
    assert ("step", None) not in second
    assert "tied" not in {name for name, _ in first + second}


def test_a_part_of_a_shard_is_that_part_and_its_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    state = replicated()
    group = PlannerGroup(monkeypatch, state, state)
    for planner, plan in zip(group.planners, group.finish(), strict=True):
        (item,) = [item for item in plan.items if item.index.fqn == "a"]
        part = planner.resolve_data(item)
        assert isinstance(part, torch.Tensor)
        assert item.index.offset is not None
        assert torch.equal(part, state["a"][item.index.offset[0] :][:300])
        assert part.untyped_storage().nbytes() == part.numel() * 4


def test_copies_on_devices_are_let_go_tensor_by_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {name: tensor.clone() for name, tensor in tensors.items() if name != "kept"}
        made.extend(weakref.ref(tensor) for tensor in found.values())
        return found

    def alive() -> list[int]:
        return [index for index, copy in enumerate(made) if copy() is not None]

    monkeypatch.setattr(adapters, "deduplicate_copies", copies)
    state = {"a": torch.ones(500), "b": torch.ones(400), "kept": torch.ones(3)}
    group = PlannerGroup(monkeypatch, state, state)
    plans = group.finish()
    written = {item.index.fqn for plan in plans for item in plan.items}
    assert written == set(state)
    # What another rank writes is gone at once.
    assert len(alive()) == 2
    for planner, plan in zip(group.planners, plans, strict=True):
        for item in plan.items:
            before = len(alive())
            planner.resolve_data(item)
            assert len(alive()) == before - (item.index.fqn != "kept")
    assert alive() == []


def test_plans_of_other_ranks_than_the_planner_knows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    group = PlannerGroup(monkeypatch, {}, {}, {})
    with pytest.raises(WrongRanksError, match="process_group"):
        group.planners[0].create_global_plan([pickle.loads(plan) for plan in group.sent[:2]])


@pytest.mark.parametrize("storage_data", [{}, {"shard_index": 1}])
def test_a_safetensors_writer_is_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, storage_data: object
) -> None:
    group = PlannerGroup(monkeypatch, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    plans, _ = group.agree()
    for planner, plan in zip(group.planners, plans, strict=True):
        with pytest.raises(UnsupportedWriterError, match="checkpoint_to_safetensors"):
            planner.finish_plan(pickle.loads(pickle.dumps(replace(plan, storage_data=storage_data))))


def test_what_a_writer_lost_is_noticed_and_ties_are_completed() -> None:
    def metadata() -> GlobalMetadata:
        planner = SPMDSavePlanner()
        tied = torch.ones(2)
        planner.set_up_planner({"a": tied, "b": tied, "v": 1}, is_coordinator=True)
        _, made = planner.create_global_plan([planner.create_local_plan()])
        assert isinstance(made, GlobalMetadata)
        return replace(made, version="1")

    written = {MetadataIndex("a", [0]): "here", MetadataIndex("v"): "there"}
    whole = metadata()
    whole.storage_data = written
    assert whole.storage_data == {**written, MetadataIndex("b", [0]): "here"}
    assert type(whole) is Metadata
    for lost in written:
        with pytest.raises(LostWritesError, match=f"1 pieces.*{lost.fqn}|2 pieces.*{lost.fqn}"):
            metadata().storage_data = {index: place for index, place in written.items() if index != lost}


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


class Kept(SPMDSavePlanner):
    """Has an argument, and something of its own."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor


def test_a_subclass_arrives_in_another_process_as_what_it_is() -> None:
    planner = pickle.loads(pickle.dumps(Kept(3)))
    assert (type(planner), planner.factor) == (Kept, 3)
