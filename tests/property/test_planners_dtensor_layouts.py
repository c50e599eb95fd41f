"""For every mesh, placements and shape our boxes are torch's own, and no overlap of any boxes is overlooked."""

import random
from itertools import combinations, product
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import scaled
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from stepkeeper_planners.adapters.placements import DimShard, RankMesh, box_of_rank, chunks_on_mesh
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.cover import check_cover
from stepkeeper_planners.geometry.overlapping_pair import find_overlap
from stepkeeper_planners.loading.resharding import find_intersections

SHAPES = st.lists(st.integers(1, 11), min_size=1, max_size=3).map(tuple)


@st.composite
def meshes(draw: st.DrawFn) -> RankMesh:
    """Draw meshes of up to 3 dimensions, in any order, some ranks left out."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ranks = draw(st.permutations(range(prod(shape) + 2)))[: prod(shape)]
    return RankMesh(shape=shape, ranks=tuple(ranks))


@st.composite
def cases(draw: st.DrawFn) -> tuple[RankMesh, tuple[int, ...], list[DimShard | None]]:
    mesh, shape = draw(meshes()), draw(SHAPES)
    ndim = len(shape)
    cuts: list[DimShard | None] = []
    for _ in mesh.shape:
        dim = draw(st.none() | st.integers(-ndim, ndim - 1))
        cuts.append(None if dim is None else DimShard(dim=dim))
    return mesh, shape, cuts


@st.composite
def strided_cases(draw: st.DrawFn) -> tuple[RankMesh, tuple[int, ...], list[DimShard | None]]:
    """FSDP over tensor parallelism, copied or not: the last mesh dimension cuts first."""
    mesh, shape = draw(meshes().filter(lambda mesh: len(mesh.shape) > 1 < mesh.shape[-1])), draw(SHAPES)
    dim = draw(st.integers(0, len(shape) - 1))
    over = DimShard(dim=dim, split_factor=mesh.shape[-1])
    cuts: list[DimShard | None] = [over, DimShard(dim=dim)]
    if len(mesh.shape) == 3:
        # Cuts that another strided shard is made over are counted in its factor.
        more = DimShard(dim=dim, split_factor=mesh.shape[-1] * mesh.shape[-2])
        cuts.insert(
            0, draw(st.sampled_from([None, more, DimShard(dim=draw(st.integers(0, len(shape) - 1)))]))
        )
    return mesh, shape, cuts


def torch_placements(cuts: list[DimShard | None], ndim: int) -> list[Placement]:
    found: list[Placement] = []
    for cut in cuts:
        if cut is None:
            found.append(Replicate())
        elif cut.split_factor == 1:
            found.append(Shard(cut.dim % ndim))
        else:
            found.append(_StridedShard(cut.dim % ndim, split_factor=cut.split_factor))
    return found


@given(cases() | strided_cases())
def test_every_rank_holds_what_torch_says(
    case: tuple[RankMesh, tuple[int, ...], list[DimShard | None]],
) -> None:
    mesh, shape, cuts = case
    chunks = chunks_on_mesh(mesh, tuple(cuts), shape)
    check_cover("w", shape, [chunk.box for chunk in chunks])
    grid = np.array(mesh.ranks).reshape(mesh.shape)
    holders: dict[Box, set[int]] = {}
    for place in product(*map(range, mesh.shape)):
        rank = int(grid[place])
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, mesh.shape, list(place), torch_placements(cuts, len(shape))
        )
        held = box_of_rank(mesh, tuple(cuts), shape, rank)
        if not prod(sizes):
            assert held is None
            continue
        assert held == Box(offsets=tuple(offsets), sizes=tuple(sizes))
        holders.setdefault(held, set()).add(rank)
    assert {chunk.box: {owner.rank for owner in chunk.owners} for chunk in chunks} == holders
    assert all(len(chunk.owners) == len(holders[chunk.box]) for chunk in chunks)
    outside = set(range(prod(mesh.shape) + 2)) - set(mesh.ranks)
    assert all(box_of_rank(mesh, tuple(cuts), shape, rank) is None for rank in outside)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_fsdp_over_two_axes_of_tensor_parallelism_is_cut_last(dp: int, ep: int, tp: int, part: int) -> None:
    """Torch's own function gives up on this one; the truth is the tensor itself, cut as FSDP cuts it."""
    size = dp * ep * tp * part
    mesh = RankMesh(shape=(dp, ep, tp), ranks=tuple(range(dp * ep * tp)))
    cuts = (DimShard(dim=0, split_factor=ep * tp), DimShard(dim=0), DimShard(dim=0))
    whole = np.arange(size)
    for rank, (d, e, t) in enumerate(product(range(dp), range(ep), range(tp))):
        expected = np.split(np.split(np.split(whole, ep)[e], tp)[t], dp)[d]
        held = box_of_rank(mesh, cuts, (size,), rank)
        assert held is not None
        assert np.array_equal(whole[held.slices], expected)


def box(*spans: tuple[int, int]) -> Box:
    return Box(offsets=tuple(a for a, _ in spans), sizes=tuple(b - a for a, b in spans))


@settings(deadline=None, max_examples=scaled(120))
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(0, 150),
    st.integers(2, 400),
)
def test_found_exactly_if_there_is_one(seed: int, n_axes: int, n_boxes: int, side: int) -> None:
    chance = random.Random(seed)

    def any_box() -> Box:
        starts = [chance.randrange(side) for _ in range(n_axes)]
        return box(*((start, start + chance.randint(0, 1 + side // 20)) for start in starts))

    boxes = [any_box() for _ in range(n_boxes)]
    found = find_overlap(boxes)
    if found is None:
        assert all(one.intersect(other) is None for one, other in combinations(boxes, 2))
    else:
        assert found[0] < found[1]
        assert boxes[found[0]].intersect(boxes[found[1]]) is not None


@settings(max_examples=scaled(50))
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 300), st.integers(0, 150))
def test_no_common_part_is_overlooked(seed: int, n_axes: int, n_boxes: int, n_asking: int) -> None:
    chance = random.Random(seed)

    def any_box() -> Box:
        return box(
            *(
                (min(span), max(span))
                for span in ((chance.randrange(40), chance.randrange(40)) for _ in range(n_axes))
            )
        )

    many, asking = ([any_box() for _ in range(number)] for number in (n_boxes, n_asking))
    each = [
        [(n, common) for n, held in enumerate(many) if (common := asked.intersect(held)) is not None]
        for asked in asking
    ]
    assert find_intersections(asking, many) == each
