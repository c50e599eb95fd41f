"""Test the text of a mesh and placements, where there is none, and that thousands of tensors share it."""

import pytest

from stepkeeper_planners.adapters.placements import (
    DimShard,
    Placements,
    RankMesh,
    add_slice_dimension,
    box_of_rank,
    check_ascending_ranks,
    chunks_on_mesh,
)
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Owner


def test_a_mesh_need_not_be_in_the_order_of_ranks_nor_hold_all() -> None:
    mesh = RankMesh(shape=(2,), ranks=(5, 3))
    first, second = chunks_on_mesh(mesh, (DimShard(dim=-1),), (4, 3))
    assert (first.box, first.owners) == (Box(offsets=(0, 0), sizes=(4, 2)), (Owner(rank=5, local_index=0),))
    assert (second.box, second.owners) == (Box(offsets=(0, 2), sizes=(4, 1)), (Owner(rank=3, local_index=0),))
    assert box_of_rank(mesh, (DimShard(dim=-1),), (4, 3), 4) is None


@pytest.mark.parametrize(
    ("shape", "ranks", "placements"),
    [
        ((2,), (1, 0), (DimShard(dim=0),)),
        ((3,), (0, 2, 1), (DimShard(dim=1),)),
        ((2, 2), (2, 3, 0, 1), (DimShard(dim=0), None)),
        ((2, 2), (0, 1, 3, 2), (None, DimShard(dim=0))),
    ],
)
def test_a_tensor_is_not_cut_along_ranks_that_do_not_ascend(
    shape: tuple[int, ...], ranks: tuple[int, ...], placements: Placements
) -> None:
    with pytest.raises(UnsupportedShardingError, match=r"mesh \[.*full_tensor\(\).*in ascending order"):
        check_ascending_ranks(RankMesh(shape=shape, ranks=ranks), placements)


@pytest.mark.parametrize(
    ("shape", "ranks", "placements"),
    [
        ((2,), (1, 0), (None,)),
        ((2,), (3, 5), (DimShard(dim=0),)),
        ((2, 2), (2, 3, 0, 1), (None, DimShard(dim=0))),
        ((2, 2), (0, 2, 1, 3), (DimShard(dim=0), DimShard(dim=1))),
        ((1, 2), (1, 0), (DimShard(dim=0), None)),
    ],
)
def test_copies_may_lie_along_ranks_in_any_order(
    shape: tuple[int, ...], ranks: tuple[int, ...], placements: Placements
) -> None:
    check_ascending_ranks(RankMesh(shape=shape, ranks=ranks), placements)


@pytest.mark.parametrize("placements", [(None,), (DimShard(dim=1),)])
def test_an_empty_tensor_is_one_chunk_that_all_of_the_mesh_hold(placements: Placements) -> None:
    (chunk,) = chunks_on_mesh(RankMesh(shape=(2,), ranks=(1, 2)), placements, (0, 4))
    assert chunk.box == Box(offsets=(0, 0), sizes=(0, 4))
    assert [owner.rank for owner in chunk.owners] == [1, 2]


@pytest.mark.parametrize(
    ("placements", "words"),
    [
        ((None,), "1 placements for a mesh of 2 dimensions"),
        ((DimShard(dim=2), None), "dimension 2 of a tensor of 2 dimensions"),
        ((DimShard(dim=0, split_factor=2), None), "several separate pieces. redistribute"),
        ((DimShard(dim=0, split_factor=3), DimShard(dim=0)), r"split factor 3.* into \[2\]"),
    ],
    ids=[
        "one placement for each mesh dimension",
        "a dimension that isn't there",
        "a strided shard over nothing",
        "a strided shard over something else",
    ],
)
def test_what_says_nothing_of_who_holds_what_is_refused(placements: Placements, words: str) -> None:
    with pytest.raises(UnsupportedShardingError, match=words):
        chunks_on_mesh(RankMesh(shape=(2, 2), ranks=(0, 1, 2, 3)), placements, (4, 4))


def test_tensors_of_a_thousand_ranks_share_chunks_and_owners() -> None:
    mesh, again = (RankMesh(shape=(32, 32), ranks=tuple(range(1024))) for _ in range(2))
    chunks = chunks_on_mesh(mesh, (None, DimShard(dim=0)), (4096, 8))
    assert chunks_on_mesh(again, (None, DimShard(dim=0)), (4096, 8)) is chunks
    other = chunks_on_mesh(mesh, (None, DimShard(dim=0)), (64,))
    assert len(other) == len(chunks) == 32
    assert all(a.owners is b.owners for a, b in zip(chunks, other, strict=True))


def test_what_is_no_slice_of_the_other_mesh_has_nothing_beside_it() -> None:
    root = RankMesh(shape=(2, 2), ranks=(0, 1, 2, 3))
    for mesh in (root, RankMesh(shape=(2,), ranks=(0, 3)), RankMesh(shape=(3,), ranks=(0, 1, 2))):
        assert add_slice_dimension(mesh, root) == mesh
