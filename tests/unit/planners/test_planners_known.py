"""What a plan's digest stands for, and shares that are taken for no plan."""

from dataclasses import replace
from typing import Any

import pytest

from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, Ranks, TensorLayout, whole_tensor
from stepkeeper_planners.saving.assignment import SavePlan, plan_save
from stepkeeper_planners.saving.known_plan import Structure, WrittenShare, known_plan, plan_digest

RANKS = Ranks(rank=1, world_size=2)
VALUES = {"cursor": 10_000, "step": 8}


def halves(fqn: str, *, at: int = 4) -> TensorLayout:
    spans = (0, at), (at, 8 - at)
    chunks = tuple(
        Chunk(
            box=Box(offsets=(start, 0), sizes=(size, 3)),
            owners=(Owner(rank=rank, local_index=0),),
        )
        for rank, (start, size) in enumerate(spans)
    )
    return TensorLayout(fqn=fqn, dtype="float32", global_shape=(8, 3), chunks=chunks)


LAYOUTS = (halves("w"), whole_tensor("b", "float32", (3,), RANKS))


def structure(layouts: Any = LAYOUTS, sizes: Any = VALUES, ranks: Ranks = RANKS) -> Structure:
    return Structure(layouts=tuple(layouts), value_bytes=sizes, ranks=ranks)


PLAN = plan_save(LAYOUTS, VALUES, RANKS)
DIGEST = plan_digest(structure(), PLAN)


def box(*offsets_and_sizes: tuple[int, int]) -> Box:
    return Box(offsets=tuple(o for o, _ in offsets_and_sizes), sizes=tuple(s for _, s in offsets_and_sizes))


def known(found: Structure, **changed: Any) -> object:
    assert DIGEST is not None
    boxes: dict[str, list[Box]] = {}
    for write in PLAN.tensors:
        boxes.setdefault(write.fqn, []).append(write.box)
    return known_plan(found, replace(WrittenShare(digest=DIGEST, boxes=boxes, values=PLAN.values), **changed))


@pytest.mark.parametrize(
    "found", [structure(), structure(LAYOUTS[::-1]), structure(sizes=VALUES | {"step": 4_000})]
)
def test_the_same_state_on_the_same_rank_has_its_plan_again(found: Structure) -> None:
    assert known(found) == PLAN


@pytest.mark.parametrize(
    "found",
    [
        structure((halves("w", at=3), LAYOUTS[1])),
        structure((replace(LAYOUTS[0], dtype="int32"), LAYOUTS[1])),
        structure((whole_tensor("w", "float32", (12,), RANKS), LAYOUTS[1])),
        structure((whole_tensor("w", "float32", (), RANKS), LAYOUTS[1])),
        structure((whole_tensor("w", "float32", (8, 3, 1), RANKS), LAYOUTS[1])),
        structure((*LAYOUTS, halves("more"))),
        structure(LAYOUTS[1:]),
        structure(sizes=VALUES | {"cursor": 20_000}),
        structure(sizes=VALUES | {"more": 1}),
        structure(sizes={"step": 8}),
        structure(ranks=Ranks(rank=0, world_size=2)),
        structure(ranks=Ranks(rank=1, world_size=3)),
    ],
)
def test_another_structure_is_planned_anew(found: Structure) -> None:
    assert known(found) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"boxes": {}},
        {"boxes": {"w": [box((4, 3), (0, 3))]}},
        {"boxes": {"w": [box((0, 8), (0, 3))]}},
        {"boxes": {"w": [box((4, 4))]}},
        {"values": ("step",)},
        {"digest": "0" * 32},
    ],
)
def test_what_was_written_otherwise_is_no_plan(changed: dict[str, Any]) -> None:
    assert known(structure(), **changed) is None


def test_other_rules_are_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepkeeper_planners.saving.rules.ASSIGNMENT_VERSION", 0)
    assert known(structure()) is None


def test_of_a_layout_that_is_not_complete_nothing_is_known() -> None:
    """Its digest says nothing of where its chunks are: a part that has grown would be left out."""
    chunk = Chunk(box=box((0, 3)), owners=(Owner(rank=0, local_index=0),))
    part = TensorLayout(fqn="w", dtype="int8", global_shape=(9,), chunks=(chunk,), complete=False)
    grown = replace(part, chunks=(replace(chunk, box=box((0, 6))),))
    alone = Ranks(rank=0, world_size=1)
    before, after = structure((part,), {}, alone), structure((grown,), {}, alone)
    assert before.forms == after.forms
    assert plan_digest(before, SavePlan(tensors=(), values=())) is None
