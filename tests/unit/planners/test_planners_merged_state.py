"""States that have different names on different ranks: put together where parts fit, and told apart where not."""

import pytest

from stepkeeper_planners.errors import LayoutError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, TensorLayout
from stepkeeper_planners.loading.differences import Differences, Findings, intersect_unexpected
from stepkeeper_planners.saving.assignment import assign
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


def test_what_each_group_says_of_its_own_ranks_counts_and_no_more() -> None:
    everywhere = rows("w", (0, 4, (0, 1, 2)))
    result = united(((1,), [], {}), ((0,), [everywhere], {"v": 1}), ((2,), [everywhere], {"v": 1}))
    assert result is not None
    assert result.layouts == (rows("w", (0, 4, (0, 2))),)
    assert result.value_writers == {"v": 0}


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
        match=r"w: the chunks, of rank 0, hold 4 of 8 elements .*; the one at \(2, 0\) is in none",
    ):
        assign(result.layouts, 2)


def test_ranks_that_speak_of_different_tensors_are_named() -> None:
    with pytest.raises(LayoutError, match=r"w: its global_shape is \(4, 2\) on rank 0, \(6, 2\) on rank 3"):
        join_layouts({3: rows("w", (4, 2, (3,)), n_rows=6), 0: rows("w", (0, 4, (0,)))})


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
