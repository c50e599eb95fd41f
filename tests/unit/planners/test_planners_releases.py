"""Ranks of different releases don't save together: each finds out for itself who writes what."""

import hashlib
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from stepkeeper_planners import SPMDSavePlanner
from stepkeeper_planners.errors import ReleasesDifferError, WrongRanksError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, Ranks, TensorLayout, whole_tensor
from stepkeeper_planners.saving import planner as save_module
from stepkeeper_planners.saving import proposals
from stepkeeper_planners.saving.assignment import ASSIGNMENT_VERSION, assign


def proposed(
    monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int = 3
) -> tuple[SPMDSavePlanner, SavePlan]:
    """A rank's planner, and its plan as the coordinator gets it."""
    planner = SPMDSavePlanner()
    monkeypatch.setattr(save_module, "current_ranks", lambda _: Ranks(rank=rank, world_size=world_size))
    planner.set_up_planner({"w": torch.ones(4)}, is_coordinator=rank == 0)
    return planner, pickle.loads(pickle.dumps(planner.create_local_plan()))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("ASSIGNMENT_VERSION", ASSIGNMENT_VERSION + 1),
        ("BALANCE", {"slices from": 1}),
        ("_release", lambda: "9.8.7"),
    ],
)
def test_a_rank_with_other_rules_is_named_with_them(
    monkeypatch: pytest.MonkeyPatch, name: str, other: Any
) -> None:
    coordinator, first = proposed(monkeypatch, 0)
    _, second = proposed(monkeypatch, 1)
    monkeypatch.setattr(proposals, name, other)
    _, third = proposed(monkeypatch, 2)
    with pytest.raises(ReleasesDifferError, match="run one release") as caught:
        coordinator.create_global_plan([first, second, third])
    text = str(caught.value)
    assert f"Ranks 0, 1: {first.planner_data.rules}; rank 2: {third.planner_data.rules}" in text


def test_ranks_that_count_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, first = proposed(monkeypatch, 0, 2)
    _, second = proposed(monkeypatch, 1, 5)
    with pytest.raises(ReleasesDifferError, match=r"2 ranks.*5 ranks"):
        coordinator.create_global_plan([first, second])


def test_a_plan_of_another_planner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, first = proposed(monkeypatch, 0, 2)
    with pytest.raises(WrongRanksError, match="ranks 1 plan with another planner"):
        coordinator.create_global_plan([first, SavePlan(items=[])])


def test_who_writes_what_is_as_it_was_in_this_version() -> None:
    """If this fails, ranks of this release and of the last one can't save together: raise ASSIGNMENT_VERSION."""
    everyone = Ranks(rank=0, world_size=6)
    layouts = [whole_tensor(f"t{n}", "float32", (1 + 37 * n, 64), everyone) for n in range(40)]
    for number, sizes in enumerate([(700, 300), (40_000, 64), (1, 5)]):
        boxes = [Box(offsets=(part * sizes[0], 0), sizes=sizes) for part in range(3)]
        chunks = tuple(
            Chunk(box=box, owners=tuple(Owner(rank=rank, local_index=0) for rank in (part, part + 3)))
            for part, box in enumerate(boxes)
        )
        shape = (3 * sizes[0], sizes[1])
        layouts.append(TensorLayout(fqn=f"s{number}", dtype="bfloat16", global_shape=shape, chunks=chunks))
    found = assign(layouts, 6, value_bytes={"loader": 90_000, "rng": 5_000, "step": 8})
    shares = [(rank, w.fqn, w.box.offsets, w.box.sizes) for rank in range(6) for w in found.list_writes(rank)]
    text = repr((shares, sorted(found.value_writers.items())))
    assert (ASSIGNMENT_VERSION, hashlib.sha256(text.encode()).hexdigest()[:16]) == (3, "7085739ea2bb8646")
