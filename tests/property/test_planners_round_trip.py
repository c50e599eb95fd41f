"""For any layouts, numbers of ranks and dtypes: what one real planner wrote the other reads, bit for bit."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planners_parts.parts import DTYPES, SHAPES, bits, boxes_of, parts_in, parts_of, random_elements
from thoroughness import scaled
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.loading import planner as load_module
from stepkeeper_planners.saving import planned_state
from stepkeeper_planners.saving import planner as save_module

# Of complex32, which torch stores none the less.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

WORLDS = st.integers(1, 4)
LARGE = 200_000
"""Bytes of a tensor that all ranks have, and share out."""

Stored = dict[MetadataIndex, Any]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], world_size: int) -> list[list[Box]]:
    """Draw the boxes of each rank: any cover of the shape, each part of it on any ranks."""
    held: list[list[Box]] = [[] for _ in range(world_size)]
    for box in draw(boxes_of(shape)):
        for rank in draw(st.sets(st.integers(0, world_size - 1), min_size=1)):
            held[rank].append(box)
    return held


@contextmanager
def as_rank(module: Any, rank: int, world_size: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "current_ranks", lambda _: Ranks(rank=rank, world_size=world_size))
        yield


@contextmanager
def exchanging(world_size: int) -> Iterator[None]:
    """Let threads exchange objects as ranks do. All get the same: they compare copies, which are equal here."""
    values: list[object] = []
    met = Barrier(world_size)

    def all_gather_object(value: object, _: object) -> list[object]:
        values.append(value)
        met.wait(60)
        return values

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_state, "all_gather_object", all_gather_object)
        yield


def sent(plan: Any) -> Any:
    return pickle.loads(pickle.dumps(plan))


def saved(states: Sequence[dict[str, Any]]) -> tuple[Stored, Metadata]:
    """Save, and return what the ranks wrote and the coordinator's metadata."""
    planners, plans, stored = [SPMDSavePlanner() for _ in states], [], Stored()
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        with as_rank(save_module, rank, len(states)):
            planner.set_up_planner(state, is_coordinator=rank == 0)
            plans.append(sent(planner.create_local_plan()))
    answers, metadata = planners[0].create_global_plan(plans)
    with exchanging(len(states)), ThreadPoolExecutor(len(states)) as ranks:
        finished = list(ranks.map(SPMDSavePlanner.finish_plan, planners, map(sent, answers)))
    for planner, plan in zip(planners, finished, strict=True):
        for item in plan.items:
            assert item.index not in stored, "written twice"
            data = planner.resolve_data(item)
            stored[item.index] = data.clone() if isinstance(data, torch.Tensor) else data
    # What is written is what the coordinator told, or this raises.
    metadata.storage_data = dict.fromkeys(stored, "somewhere")
    return stored, metadata


def load(states: Sequence[dict[str, Any]], stored: Stored, metadata: Metadata) -> None:
    planners, plans = [SPMDLoadPlanner() for _ in states], []
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        with as_rank(load_module, rank, len(states)):
            planner.set_up_planner(state, metadata, is_coordinator=rank == 0)
            plans.append(sent(planner.create_local_plan()))
    for planner, answer in zip(planners, planners[0].create_global_plan(plans), strict=True):
        for item in planner.finish_plan(sent(answer)).items:
            data = stored[item.storage_index]
            if not isinstance(data, torch.Tensor):
                data.seek(0)
                planner.load_bytes(item, data)
                continue
            part = Box(offsets=tuple(item.storage_offsets), sizes=tuple(item.lengths))
            target = planner.resolve_tensor(item).detach()
            target.copy_(data[part.slices])
            planner.commit_tensor(item, target)


def covered(metadata: Metadata, fqn: str) -> torch.Tensor:
    """Count in how many chunks each element is."""
    entry = metadata.state_dict_metadata[fqn]
    assert isinstance(entry, TensorStorageMetadata)
    times = torch.zeros(entry.size, dtype=torch.int64)
    for chunk in entry.chunks:
        times[Box(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes)).slices] += 1
    return times


@settings(deadline=None, max_examples=scaled(60))
@given(st.data(), SHAPES, st.sampled_from(DTYPES), st.integers(0, 2**32), WORLDS, WORLDS)
def test_save_in_one_layout_and_load_in_another_is_the_identity(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype, seed: int, saved_by: int, loaded_by: int
) -> None:
    whole = random_elements(shape, dtype, seed)
    large = random_elements((LARGE // dtype.itemsize,), dtype, seed)

    def states(world_size: int, fill: Callable[[torch.Tensor], None] | None) -> list[dict[str, Any]]:
        made = []
        for boxes in data.draw(layouts(shape, world_size)):
            parts = parts_of(boxes, shape, dtype)
            if fill is not None:
                fill(parts)
            copy = large.clone() if fill is not None else torch.zeros_like(large)
            made.append({"w": parts, "large": copy, "step": 7 if fill is not None else 0})
        return made

    def filled(parts: torch.Tensor) -> None:
        for box, part in parts_in(parts):
            part.copy_(whole[box.slices])

    stored, metadata = saved(states(saved_by, filled))
    for fqn in ("w", "large"):
        assert bool((covered(metadata, fqn) == 1).all())
    targets = states(loaded_by, None)
    load(targets, stored, metadata)
    for state in targets:
        assert bits(state["large"]) == bits(large)
        assert state["step"] == 7
        for box, part in parts_in(state["w"]):
            assert bits(part) == bits(whole[box.slices])
