"""Test which rank writes what: every element once, the same on every rank, and as even as the layout allows."""

from collections.abc import Sequence
from itertools import combinations, pairwise, product
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import scaled

from stepkeeper_planners.dtypes import itemsize_bytes
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, Ranks, TensorLayout
from stepkeeper_planners.saving.assignment import assign, plan_save

GRAIN_BYTES = 8
"""Small enough that the tensors drawn here are cut."""


def rows(fqn: str, *pieces: tuple[int, int, tuple[int, ...]]) -> TensorLayout:
    """A 1-dim tensor cut into (start, size, ranks that hold it)."""
    chunks = tuple(
        Chunk(
            box=Box(offsets=(start,), sizes=(size,)),
            owners=tuple(Owner(rank=r, local_index=i) for r in ranks),
        )
        for i, (start, size, ranks) in enumerate(pieces)
    )
    return TensorLayout(fqn=fqn, dtype="float32", global_shape=(sum(s for _, s, _ in pieces),), chunks=chunks)


@st.composite
def layouts(draw: st.DrawFn, fqn: str, world_size: int) -> TensorLayout:
    """Cut anywhere along each dimension; each part held by any ranks, on some of them more than once."""
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=3)))
    dtype = draw(st.sampled_from(["int8", "bfloat16", "float32", "complex128"]))
    places = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    spans = [list(pairwise(points)) or [(0, 0)] for points in places]
    counts = dict.fromkeys(range(world_size), 0)
    chunks = []
    for cell in product(*spans):
        owners = []
        for rank in draw(st.lists(st.integers(0, world_size - 1), min_size=1, max_size=world_size + 1)):
            owners.append(Owner(rank=rank, local_index=counts[rank]))
            counts[rank] += 1
        box = Box(offsets=tuple(a for a, _ in cell), sizes=tuple(b - a for a, b in cell))
        chunks.append(Chunk(box=box, owners=tuple(owners)))
    return TensorLayout(fqn=fqn, dtype=dtype, global_shape=shape, chunks=tuple(chunks))


@st.composite
def states(draw: st.DrawFn) -> tuple[list[TensorLayout], int]:
    world_size = draw(st.integers(1, 5))
    return [draw(layouts(f"t{n}", world_size)) for n in range(draw(st.integers(0, 6)))], world_size


def least_heaviest_bytes(bound: Sequence[tuple[frozenset[int], int]], world_size: int) -> int:
    """By the theorem of max-flow and min-cut: some set of ranks has to write all that only its members hold."""
    sets = (set(s) for n in range(1, world_size + 1) for s in combinations(range(world_size), n))
    return max(-(-sum(size for holders, size in bound if holders <= ranks) // len(ranks)) for ranks in sets)


def held(layouts: Sequence[TensorLayout]) -> list[tuple[frozenset[int], int]]:
    return [
        (frozenset(owner.rank for owner in chunk.owners), chunk.box.volume * itemsize_bytes(layout.dtype))
        for layout in layouts
        for chunk in layout.chunks
    ]


@given(states())
def test_every_element_is_written_once_from_a_shard_that_holds_it(
    case: tuple[list[TensorLayout], int],
) -> None:
    layouts, world_size = case
    assignment = assign(layouts, world_size, min_slice_bytes=GRAIN_BYTES)
    written = {layout.fqn: np.zeros(layout.global_shape, dtype=np.int64) for layout in layouts}
    held = {
        (layout.fqn, owner): chunk.box
        for layout in layouts
        for chunk in layout.chunks
        for owner in chunk.owners
    }
    boxes: dict[str, list[Box]] = {}
    for rank in range(world_size):
        for write in assignment.list_writes(rank):
            written[write.fqn][write.box.slices] += 1
            shard = held[write.fqn, Owner(rank=rank, local_index=write.local_index)]
            assert shard.contains(write.box)
            assert write.shard_box == write.box.relative_to(shard.offsets)
            boxes.setdefault(write.fqn, []).append(write.box)
    for layout in layouts:
        assert (written[layout.fqn] == 1).all()
        assert assignment.list_boxes()[layout.fqn] == sorted(boxes[layout.fqn])
        # Readers find a piece by its name and where it starts.
        assert len({box.offsets for box in boxes[layout.fqn]}) == len(boxes[layout.fqn])


@st.composite
def overlapping_copies(draw: st.DrawFn) -> tuple[list[TensorLayout], int]:
    """Large enough to be cut, and held by sets of ranks that overlap: bytes move between many groups."""
    world_size = draw(st.integers(3, 6))
    holders = st.sets(st.integers(0, world_size - 1), min_size=2)
    drawn = draw(st.lists(st.tuples(st.sampled_from([100, 3000, 5000, 10_000]), holders), max_size=6))
    made = []
    for n, (size, ranks) in enumerate(drawn):
        owners = tuple(Owner(rank=rank, local_index=0) for rank in sorted(ranks))
        chunk = Chunk(box=Box.whole((size,)), owners=owners)
        made.append(TensorLayout(fqn=f"t{n}", dtype="float32", global_shape=(size,), chunks=(chunk,)))
    return made, world_size


@given(states() | overlapping_copies(), st.randoms())
@settings(deadline=None, max_examples=scaled(300))
def test_every_rank_finds_the_same_in_any_order(case: tuple[list[TensorLayout], int], random: Random) -> None:
    layouts, world_size = case
    shares = []
    for rank in range(world_size):
        mixed = list(layouts)
        random.shuffle(mixed)
        shares.append(assign(mixed, world_size, min_slice_bytes=GRAIN_BYTES).list_writes(rank))
        ranks = Ranks(rank=rank, world_size=world_size)
        assert plan_save(mixed, {"v": 1}, ranks) == plan_save(layouts, {"v": 1}, ranks)
        assert plan_save(layouts, {}, ranks).tensors == assign(layouts, world_size).list_writes(rank)
    expected = assign(layouts, world_size, min_slice_bytes=GRAIN_BYTES)
    assert shares == [expected.list_writes(rank) for rank in range(world_size)]


def grain_bytes(layouts: Sequence[TensorLayout], least: int) -> int:
    """The largest of what several ranks hold and is not cut, or the least that is cut off."""
    grain = 0
    for layout in layouts:
        for chunk in layout.chunks:
            if len({owner.rank for owner in chunk.owners}) > 1 and chunk.box.volume:
                size = chunk.box.volume * itemsize_bytes(layout.dtype)
                row = size // max(chunk.box.sizes, default=1)
                whole = size if size < 2 * least or size < 4 * row else 0
                grain = max(grain, whole, least, row)
    return grain


def check_even(layouts: Sequence[TensorLayout], world_size: int) -> None:
    optimum = least_heaviest_bytes(held(layouts), world_size)
    total = sum(size for _, size in held(layouts))
    grain = grain_bytes(layouts, max(GRAIN_BYTES, -(-total // world_size) // 64))
    made = assign(layouts, world_size, min_slice_bytes=GRAIN_BYTES)
    found = [sum(write.size_bytes for write in made.list_writes(rank)) for rank in range(world_size)]
    assert max(found) <= 1.02 * optimum + 2 * grain
    if optimum == -(-total // world_size):
        assert min(found) >= 0.98 * optimum - 2 * grain - world_size


@st.composite
def nested_sets(draw: st.DrawFn, world_size: int) -> list[tuple[int, ...]]:
    """Sets of ranks, of which any two are nested or have no rank in common."""
    ranks = draw(st.permutations(range(world_size)))
    waiting, sets = [tuple(ranks)], []
    while waiting:
        those = waiting.pop()
        sets.append(tuple(sorted(those)))
        if len(those) > 1:
            cut = draw(st.integers(1, len(those) - 1))
            waiting += [those[:cut], those[cut:]]
    return sets


@st.composite
def nested_states(draw: st.DrawFn) -> tuple[list[TensorLayout], int]:
    world_size = draw(st.integers(1, 6))
    sets = st.sampled_from(draw(nested_sets(world_size)))
    made = []
    for n in range(draw(st.integers(0, 6))):
        pieces, start = [], 0
        for ranks in draw(st.lists(sets, min_size=1, max_size=4)):
            size = draw(st.sampled_from([1, 7, 100, 3000, 5000]))
            pieces.append((start, size, ranks))
            start += size
        made.append(rows(f"t{n}", *pieces))
    return made, world_size


@given(nested_states())
@settings(deadline=None, max_examples=scaled(200))
def test_no_rank_writes_more_than_the_heaviest_must(case: tuple[list[TensorLayout], int]) -> None:
    check_even(*case)
