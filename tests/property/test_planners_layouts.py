"""For any two layouts: what is written covers every element once, and reading it into the other is the identity."""

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from planners_parts.layouts import cut_anywhere

from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Owner, Ranks, TensorLayout
from stepkeeper_planners.loading.resharding import plan_tensor_reads
from stepkeeper_planners.loading.stored_state import StoredTensor
from stepkeeper_planners.saving.assignment import plan_save

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
WORLDS = st.integers(1, 5)


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[TensorLayout, int, TensorLayout, int]:
    shape = draw(SHAPES)
    saved_by, loaded_by = draw(WORLDS), draw(WORLDS)
    return draw(layouts(shape, saved_by)), saved_by, draw(layouts(shape, loaded_by)), loaded_by


def layouts(shape: tuple[int, ...], world_size: int) -> st.SearchStrategy[TensorLayout]:
    return cut_anywhere("w", "int64", shape, world_size, most_cuts=3)


@given(two_layouts())
def test_save_in_one_layout_and_load_in_another_is_the_identity(
    case: tuple[TensorLayout, int, TensorLayout, int],
) -> None:
    saved, saved_by, wanted, loaded_by = case
    source = np.arange(prod(saved.global_shape)).reshape(saved.global_shape)
    times_written = np.zeros(saved.global_shape, dtype=np.int64)
    boxes: list[Box] = []
    contents: list[np.ndarray] = []
    for rank in range(saved_by):
        for write in plan_save([saved], {}, Ranks(rank=rank, world_size=saved_by)).tensors:
            held = [c for c in saved.chunks if Owner(rank=rank, local_index=write.local_index) in c.owners]
            assert [c.box for c in held] == [write.box]
            times_written[write.box.slices] += 1
            boxes.append(write.box)
            contents.append(source[write.box.slices].copy())
    assert (times_written == 1).all()
    stored = StoredTensor(dtype="int64", global_shape=saved.global_shape, boxes=tuple(boxes))
    for rank in range(loaded_by):
        local = wanted.local_boxes(rank)
        buffers = {index: np.full(box.sizes, -1) for index, box in local.items()}
        times_read = {index: np.zeros(box.sizes, dtype=np.int64) for index, box in local.items()}
        for piece in plan_tensor_reads(wanted, stored, Ranks(rank=rank, world_size=loaded_by)):
            to = piece.wanted_box.relative_to(local[piece.local_index].offsets).slices
            of = piece.wanted_box.relative_to(piece.stored_box.offsets).slices
            buffers[piece.local_index][to] = contents[piece.stored_index][of]
            times_read[piece.local_index][to] += 1
        for index, box in local.items():
            assert np.array_equal(buffers[index], source[box.slices])
            assert (times_read[index] == 1).all()


@given(SHAPES, st.data())
def test_the_common_part_is_what_both_have(shape: tuple[int, ...], data: st.DataObject) -> None:
    def any_box() -> Box:
        pairs = [sorted((data.draw(st.integers(0, s)), data.draw(st.integers(0, s)))) for s in shape]
        return Box(offsets=tuple(a for a, _ in pairs), sizes=tuple(b - a for a, b in pairs))

    a, b = any_box(), any_box()
    marks = np.zeros(shape, dtype=np.int64)
    marks[a.slices] += 1
    marks[b.slices] += 1
    common = a.intersect(b)
    assert common == b.intersect(a)
    assert (marks == 2).sum() == (common.volume if common else 0)
    assert common is None or (marks[common.slices] == 2).all()
    assert common is None or (a.contains(common) and b.contains(common))
