"""Who writes what: where ranks have different names, where slices hold copies, and where releases differ."""

import hashlib
import pickle
from random import Random
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from stepkeeper_planners import SPMDSavePlanner, adapters
from stepkeeper_planners.errors import (
    LayoutError,
    ReleasesDifferError,
    UnsupportedShardingError,
    WrongRanksError,
)
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, Ranks, TensorLayout, whole_tensor
from stepkeeper_planners.loading.differences import Differences, Findings, intersect_unexpected
from stepkeeper_planners.saving import planner as save_module
from stepkeeper_planners.saving import proposals
from stepkeeper_planners.saving.assignment import ASSIGNMENT_VERSION, assign, plan_save
from stepkeeper_planners.saving.fingerprints import digest_names, digest_value
from stepkeeper_planners.saving.merged_state import (
    MergedState,
    compare_with_base,
    find_names_to_merge,
    join_layouts,
    merge_states,
    select_partial_state,
)
from stepkeeper_planners.state.tree import FlatState

Group = tuple[tuple[int, ...], list[TensorLayout], dict[str, object]]


def rows(fqn: str, *parts: tuple[int, int, tuple[int, ...]], n_rows: int = 4) -> TensorLayout:
    """A tensor of rows; each part has its first row, its number of rows, and who holds it."""
    chunks = tuple(
        Chunk(
            box=Box(offsets=(first, 0), sizes=(count, 2)),
            owners=tuple(Owner(rank=rank, local_index=0) for rank in ranks),
        )
        for first, count, ranks in parts
    )
    return TensorLayout(fqn=fqn, dtype="float32", global_shape=(n_rows, 2), chunks=chunks)


def united(base: Group, *others: Group) -> MergedState | None:
    """Merge as the planners of these groups of ranks do together."""
    digests, flats, layouts = [], [], []
    for _, tensors, values in (base, *others):
        digests.append(digest_names(tensors, values={n: digest_value(n, v) for n, v in values.items()}))
        paths = {name: (name,) for name in (*(t.fqn for t in tensors), *values)}
        flats.append(FlatState(tensors={}, values=dict(values), paths=dict(paths)))
        layouts.append({tensor.fqn: tensor for tensor in tensors})
    deviations = [
        compare_with_base(ranks, digests[i], digests[0], flats[i], layouts[i])
        for i, (ranks, _, _) in enumerate(others, start=1)
    ]
    names = find_names_to_merge(digests[0], deviations)
    if names is None:
        return None
    return merge_states(names, base[0], select_partial_state(names, flats[0], layouts[0]), deviations)


def test_pipeline_stages_have_each_its_own_names() -> None:
    first, second = rows("a", (0, 2, (0,)), (2, 2, (1,))), rows("b", (0, 4, (2, 3)))
    shared = rows("both", (0, 4, (0, 1, 2, 3)))
    result = united(
        ((0, 1), [first, shared], {"lr.a": 0.1, "step": 3}),
        ((2, 3), [second, shared], {"lr.b": 0.2, "step": 3}),
    )
    assert result is not None
    assert result.layouts == (first, second)
    assert result.value_writers == {"lr.a": 0, "lr.b": 2}
    assert result.paths == {name: (name,) for name in ("a", "b", "lr.a", "lr.b")}


def test_meshes_that_know_nothing_of_one_another_hold_copies() -> None:
    result = united(
        ((0, 2), [rows("w", (0, 2, (0,)), (2, 2, (2,)))], {}),
        ((1, 3), [rows("w", (0, 2, (1,)), (2, 2, (3,)))], {}),
    )
    assert result is not None
    assert result.layouts == (rows("w", (0, 2, (0, 1)), (2, 2, (2, 3))),)


@pytest.mark.parametrize(
    "theirs",
    [
        ([], {"v": 2}),
        ([rows("v", (0, 4, (1,)))], {}),
    ],
    ids=["another value", "a tensor in place of a value"],
)
def test_what_differs_where_it_is_is_not_put_together(
    theirs: tuple[list[TensorLayout], dict[str, object]],
) -> None:
    assert united(((0,), [], {"v": 1}), ((1,), *theirs)) is None
    assert united(((0,), [], {"v": 1}), ((1,), [], {})) is not None


def test_parts_that_leave_a_gap_are_refused_by_name() -> None:
    result = united(((0,), [rows("w", (0, 2, (0,)), (2, 2, (1,)))], {}), ((1,), [], {}))
    assert result is not None
    with pytest.raises(
        LayoutError,
        match=r"w: the chunks, of rank 0, hold 4 of 8 elements",
    ):
        assign(result.layouts, 2)


def test_only_what_no_rank_asks_for_is_unexpected() -> None:
    stored = ["a", "b", "c"]
    first = Findings.from_differences(Differences(unexpected=("b", "c")), stored, short=False)
    second = Findings.from_differences(Differences(unexpected=("a", "c"), missing=("x",)), stored, short=True)
    assert intersect_unexpected([first, second], stored) == [
        Differences(unexpected=("c",)),
        Differences(unexpected=("c",), missing=("x",)),
    ]
    alone = intersect_unexpected([first, None], stored)
    assert not any(alone)


def on_slices(fqn: str, n_rows: int, *holders: tuple[int, ...]) -> TensorLayout:
    """Make as many chunks as there are holders."""
    size = n_rows // len(holders)
    chunks = tuple(
        Chunk(
            box=Box(offsets=(size * i,), sizes=(size,)),
            owners=tuple(Owner(rank=r, local_index=0) for r in ranks),
        )
        for i, ranks in enumerate(holders)
    )
    return TensorLayout(
        fqn=fqn,
        dtype="float32",
        global_shape=(size * len(holders),),
        chunks=chunks,
        mesh_slices=((0, 1), (2, 3)),
    )


def test_no_tensor_is_mixed_of_slices_and_slices_take_turns() -> None:
    layouts = [on_slices(f"cut{i}", 200_000 + i * 1000, (0, 2), (1, 3)) for i in range(6)]
    layouts += [on_slices(f"whole{i}", 300_000 + i * 1000, (0, 1, 2, 3)) for i in range(6)]
    found = assign(layouts, 4)
    writers: dict[str, set[int]] = {}
    for rank in range(4):
        for write in found.list_writes(rank):
            writers.setdefault(write.fqn, set()).add(rank)
    assert writers.keys() == {layout.fqn for layout in layouts}
    assert all(ranks <= {0, 1} or ranks <= {2, 3} for ranks in writers.values())
    loads = [sum(write.size_bytes for write in found.list_writes(rank)) for rank in range(4)]
    assert max(loads) <= 1.05 * sum(loads) / 4
    Random(1).shuffle(layouts)
    assert [assign(layouts, 4).list_writes(rank) for rank in range(4)] == [
        found.list_writes(rank) for rank in range(4)
    ]


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
    with pytest.raises(ReleasesDifferError, match="run the same release") as caught:
        coordinator.create_global_plan([first, second, third])
    text = str(caught.value)
    assert f"Ranks 0, 1: {first.planner_data.rules}; rank 2: {third.planner_data.rules}" in text


def test_a_plan_of_another_planner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, first = proposed(monkeypatch, 0, 2)
    with pytest.raises(WrongRanksError, match="ranks 1 use another planner"):
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
    assert (ASSIGNMENT_VERSION, hashlib.sha256(text.encode()).hexdigest()[:16]) == (4, "7085739ea2bb8646")


def test_ranks_that_speak_of_different_tensors_are_named() -> None:
    with pytest.raises(LayoutError, match=r"w: its global_shape is \(4, 2\) on rank 0, \(6, 2\) on rank 3"):
        join_layouts({3: rows("w", (4, 2, (3,)), n_rows=6), 0: rows("w", (0, 4, (0,)))})


def test_a_rank_alone_writes_what_the_division_among_ranks_gives_it() -> None:
    ranks = Ranks(rank=0, world_size=1)
    whole = [
        whole_tensor(name, "float32", shape, ranks) for name, shape in (("b", (3, 4)), ("a", ()), ("c", (0,)))
    ]
    for layouts in (whole, [*whole, rows("d", (2, 2, (0,)), (0, 2, (0,)))]):
        plan = plan_save(layouts, {"y": 1, "x": 9999}, ranks)
        assert plan.tensors == assign(layouts, 1).list_writes(0)
        assert plan.values == ("x", "y")
    gap = [*whole, rows("d", (0, 2, (0,)))]
    with pytest.raises(LayoutError, match="d: the chunks"):
        plan_save(gap, {}, ranks)


def test_tensors_of_one_form_are_described_as_each_is_by_itself() -> None:
    marked = torch.ones(2, 3)
    marked.note = "attributes make a tensor unusual"  # type: ignore[attr-defined]
    tensors = {
        "a": torch.ones(2, 3),
        "b": torch.zeros(2, 3),
        "c": torch.nn.Parameter(torch.ones(2, 3)),
        "d": torch.ones(2, 3, dtype=torch.int64),
        "e": torch.ones(3, 2).T,
        "f": torch.ones(()),
        "g": marked,
    }
    ranks = Ranks(rank=1, world_size=3)
    assert adapters.describe_all(tensors, ranks) == [
        adapters.describe(fqn, tensor, ranks) for fqn, tensor in tensors.items()
    ]
    tensors |= {"h": torch.quantize_per_tensor(torch.ones(2, 3), 1.0, 0, torch.qint8)}
    with pytest.raises(UnsupportedShardingError, match="h: a quantized tensor"):
        adapters.describe_all(tensors, ranks)
