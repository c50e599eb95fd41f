"""Through the real load planner: whichever boxes were stored and whichever are asked for, what arrives is the same."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planners_parts.parts import DTYPES, SHAPES, bits, boxes_of, parts_in, parts_of, random_elements
from thoroughness import scaled
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from stepkeeper_planners import SPMDLoadPlanner
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.loading.resharding import find_intersections

# Of complex32, which torch stores none the less.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")


class Memory:
    """A storage of chunks, and how often each of the tensor's elements was read from it."""

    def __init__(self, whole: torch.Tensor, boxes: list[Box]) -> None:
        self.whole, self.boxes = whole, boxes
        self.times_read = torch.zeros(whole.shape, dtype=torch.int64)
        self.metadata = Metadata(
            {
                "w": TensorStorageMetadata(
                    properties=TensorProperties(dtype=whole.dtype),
                    size=whole.shape,
                    chunks=[
                        ChunkStorageMetadata(offsets=torch.Size(b.offsets), sizes=torch.Size(b.sizes))
                        for b in boxes
                    ],
                )
            }
        )

    def load(self, tensor: torch.Tensor, seed: int, **rules: Any) -> None:
        planner = SPMDLoadPlanner(**rules)
        planner.set_up_planner({"w": tensor}, self.metadata, is_coordinator=True)
        (plan,) = planner.create_global_plan([planner.create_local_plan()])
        items = planner.finish_plan(plan).items
        random.Random(seed).shuffle(items)
        chunks = {MetadataIndex("w", b.offsets): self.whole[b.slices] for b in self.boxes}
        for item in items:
            part = Box(offsets=tuple(item.storage_offsets), sizes=tuple(item.lengths))
            target = planner.resolve_tensor(item).detach()
            target.copy_(chunks[item.storage_index][part.slices])
            planner.commit_tensor(item, target)
            chunk = item.storage_index.offset
            assert chunk is not None
            start = tuple(a + b for a, b in zip(chunk, part.offsets, strict=True))
            self.times_read[Box(offsets=start, sizes=part.sizes).slices] += 1


@settings(deadline=None)
@given(st.data(), SHAPES, st.sampled_from(DTYPES), st.integers(0, 2**32))
def test_any_boxes_load_from_any_boxes(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    whole = random_elements(shape, dtype, seed)
    memory = Memory(whole, data.draw(boxes_of(shape)))
    held = data.draw(st.permutations(data.draw(boxes_of(shape))))
    held = held[: data.draw(st.integers(1, len(held)))]
    # A device may hold a copy of what another one has.
    held += [held[number] for number in data.draw(st.lists(st.integers(0, len(held) - 1), max_size=2))]
    local: Any = parts_of(held, shape, dtype)
    memory.load(local, seed)
    wanted = torch.zeros(shape, dtype=torch.int64)
    for box, part in parts_in(local):
        assert bits(part) == bits(whole[box.slices])
        wanted[box.slices] = 1
    assert torch.equal(memory.times_read, wanted)


@settings(deadline=None)
@given(st.data(), SHAPES, st.sampled_from(DTYPES), st.integers(0, 2**32), st.booleans())
def test_a_whole_tensor_is_read_in_place(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype, seed: int, turned: bool
) -> None:
    whole = random_elements(shape, dtype, seed)
    memory = Memory(whole, data.draw(boxes_of(shape)))
    tensor = torch.zeros(shape[::-1] if turned else shape, dtype=torch.uint8).to(dtype)
    tensor = tensor.permute(*range(len(shape) - 1, -1, -1)) if turned else tensor
    address = tensor.data_ptr()
    memory.load(tensor, seed)
    assert bits(tensor) == bits(whole)
    assert tensor.data_ptr() == address
    assert (memory.times_read == 1).all()


@settings(deadline=None)
@given(st.data(), SHAPES, st.integers(0, 2**32))
def test_a_cast_gives_what_torch_gives(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    names = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.complex64]
    of = data.draw(st.sampled_from(names))
    to = data.draw(st.sampled_from([dtype for dtype in names if torch.can_cast(of, dtype)]))
    whole = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).to(of)
    memory = Memory(whole, data.draw(boxes_of(shape)))
    tensor = torch.full(shape, 99, dtype=to)
    memory.load(tensor, seed, cast=True)
    assert torch.equal(tensor, whole.to(to))


@settings(deadline=None, max_examples=scaled(50))
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 300), st.integers(0, 150))
def test_no_common_part_is_overlooked(seed: int, n_axes: int, n_boxes: int, n_asking: int) -> None:
    chance = random.Random(seed)

    def any_box() -> Box:
        spans = [sorted((chance.randrange(40), chance.randrange(40))) for _ in range(n_axes)]
        return Box(offsets=tuple(a for a, _ in spans), sizes=tuple(b - a for a, b in spans))

    many, asking = ([any_box() for _ in range(number)] for number in (n_boxes, n_asking))
    each = [
        [(n, common) for n, box in enumerate(many) if (common := asked.intersect(box)) is not None]
        for asked in asking
    ]
    assert find_intersections(asking, many) == each


@given(SHAPES, st.data())
def test_the_common_part_is_what_both_have(shape: tuple[int, ...], data: st.DataObject) -> None:
    def any_box() -> Box:
        pairs = [sorted((data.draw(st.integers(0, s)), data.draw(st.integers(0, s)))) for s in shape]
        return Box(offsets=tuple(a for a, _ in pairs), sizes=tuple(b - a for a, b in pairs))

    a, b = any_box(), any_box()
    marks = torch.zeros(shape, dtype=torch.int64)
    marks[a.slices] += 1
    marks[b.slices] += 1
    common = a.intersect(b)
    assert common == b.intersect(a)
    assert (marks == 2).sum() == (common.volume if common else 0)
    assert common is None or (marks[common.slices] == 2).all()
    assert common is None or (a.contains(common) and b.contains(common))
