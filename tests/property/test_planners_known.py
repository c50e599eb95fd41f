"""A plan is known again from what was written by it, however that was cut; nothing else is taken for it."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planners_parts.layouts import cut_anywhere

from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout, whole_tensor
from stepkeeper_planners.saving.assignment import SavePlan, assign
from stepkeeper_planners.saving.known_plan import Structure, WrittenShare, known_plan, plan_digest

GRAIN_BYTES = 8
"""Small enough that the tensors drawn here are cut among ranks."""

VALUES = {"large": 10_000, "small": 10}


@st.composite
def states(draw: st.DrawFn) -> Structure:
    world_size = draw(st.integers(1, 4))
    found = []
    for n in range(draw(st.integers(0, 5))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        dtype = draw(st.sampled_from(["int8", "float32"]))
        found.append(draw(cut_anywhere(f"t{n}", dtype, shape, world_size, most_cuts=2)))
    ranks = Ranks(rank=draw(st.integers(0, world_size - 1)), world_size=world_size)
    return Structure(layouts=tuple(found), value_bytes=VALUES, ranks=ranks)


def plan_of(structure: Structure) -> SavePlan:
    """As `plan_save`, but that even small tensors are cut."""
    ranks = structure.ranks
    assignment = assign(structure.layouts, ranks.world_size, value_bytes=VALUES, min_slice_bytes=GRAIN_BYTES)
    mine = [name for name, rank in assignment.value_writers.items() if rank == ranks.rank]
    return SavePlan(tensors=assignment.share(ranks.rank), values=tuple(sorted(mine)))


@st.composite
def cut_for_objects(draw: st.DrawFn, box: Box) -> list[Box]:
    """As objects of one size have it: rows of the first axis that has several, and so on in each part."""
    axis = next((axis for axis, size in enumerate(box.sizes) if size > 1), None)
    if axis is None or not box.volume or not draw(st.booleans()):
        return [box]
    n_rows = draw(st.integers(1, box.sizes[axis] - 1))
    parts = (0, n_rows), (n_rows, box.sizes[axis] - n_rows)
    cut = []
    for first, size in parts:
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += first
        sizes[axis] = size
        cut.append(Box(offsets=tuple(offsets), sizes=tuple(sizes)))
    return [each for part in cut for each in draw(cut_for_objects(part))]


def written_by(
    structure: Structure, plan: SavePlan, cut: Callable[[Box], list[Box]] = lambda box: [box]
) -> WrittenShare:
    """What a manifest says of it."""
    boxes: dict[str, list[Box]] = {}
    for write in plan.tensors:
        boxes.setdefault(write.fqn, []).extend(cut(write.box))
    digest = plan_digest(structure, plan)
    assert digest is not None
    return WrittenShare(digest=digest, boxes=boxes, values=[*plan.values, "cursor/of/this/rank"])


@given(states(), st.data())
@settings(deadline=None, max_examples=300)
def test_a_plan_is_known_again_however_its_boxes_were_cut(structure: Structure, data: st.DataObject) -> None:
    plan = plan_of(structure)
    written = written_by(structure, plan, lambda box: data.draw(cut_for_objects(box)))
    mixed = replace(structure, layouts=tuple(data.draw(st.permutations(structure.layouts))))
    assert known_plan(mixed, written) == plan


@st.composite
def changed(draw: st.DrawFn, layout: TensorLayout) -> TensorLayout:
    """The same tensor, but for one thing."""
    what = draw(st.sampled_from(["dtype", "shape", "owner", "chunk"]))
    chunk, *others = layout.chunks
    if what == "dtype":
        return replace(layout, dtype="float64")
    if what == "shape":
        return whole_tensor(
            layout.fqn, layout.dtype, (*layout.global_shape[1:], 2), Ranks(rank=0, world_size=1)
        )
    if what == "owner":
        first = replace(chunk.owners[0], local_index=chunk.owners[0].local_index + 50)
        return replace(layout, chunks=(replace(chunk, owners=(first, *chunk.owners[1:])), *others))
    offsets = tuple(offset + 1 for offset in chunk.box.offsets)
    return replace(layout, chunks=(replace(chunk, box=replace(chunk.box, offsets=offsets)), *others))


@given(states().filter(lambda structure: bool(structure.layouts)), st.data())
@settings(deadline=None, max_examples=300)
def test_a_state_that_differs_in_one_thing_is_planned_anew(structure: Structure, data: st.DataObject) -> None:
    plan = plan_of(structure)
    written = written_by(structure, plan)
    index = data.draw(st.integers(0, len(structure.layouts) - 1))
    layouts = list(structure.layouts)
    layouts[index] = data.draw(changed(layouts[index]))
    other = replace(structure, layouts=tuple(layouts))
    assume(other.forms != structure.forms)  # a number has no offsets to change
    assert known_plan(other, written) is None
