"""Box arithmetic and the check that chunks make up a tensor."""

import pytest

from stepkeeper_planners.errors import LayoutError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.cover import check_cover
from stepkeeper_planners.geometry.layout import Chunk, Owner, Ranks, TensorLayout


def box(*pairs: tuple[int, int]) -> Box:
    return Box(offsets=tuple(start for start, _ in pairs), sizes=tuple(size for _, size in pairs))


def test_the_common_part_of_two_boxes() -> None:
    assert box((0, 4), (2, 4)).intersect(box((2, 4), (0, 3))) == box((2, 2), (2, 1))
    assert box((0, 4)).intersect(box((4, 4))) is None
    assert box((0, 0)).intersect(box((0, 4))) is None


def test_a_scalar_is_one_element() -> None:
    scalar = Box.whole(())
    assert scalar.volume == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.slices == ()


def test_boxes_of_different_dimensions_are_not_compared() -> None:
    with pytest.raises(LayoutError, match="same number of dimensions"):
        box((0, 1)).intersect(Box.whole(()))


@pytest.mark.parametrize(("offsets", "sizes"), [((0,), ()), ((-1,), (1,)), ((0,), (-1,))])
def test_a_malformed_box_is_refused(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError):
        Box(offsets=offsets, sizes=sizes)


def test_a_box_counted_from_another_origin() -> None:
    assert box((5, 2), (7, 1)).relative_to((4, 7)) == box((1, 2), (0, 1))


def test_tiles_cover() -> None:
    check_cover("w", (4, 3), [box((0, 2), (0, 3)), box((2, 2), (0, 1)), box((2, 2), (1, 2))])
    check_cover("scalar", (), [Box.whole(())])
    check_cover("empty", (0, 3), [Box.whole((0, 3))])


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([box((0, 2), (0, 3))], "hold 6 of 12"),
        ([box((0, 3), (0, 3)), box((2, 2), (0, 3))], "overlap"),
        ([box((0, 3), (0, 3)), box((2, 1), (0, 3))], "overlap"),
        ([box((0, 4), (0, 4))], "not inside"),
        ([box((0, 4))], "not inside"),
        ([], "hold 0 of 12"),
    ],
)
def test_gaps_overlaps_and_strays_are_named(boxes: list[Box], words: str) -> None:
    with pytest.raises(LayoutError, match=f"layer.w.*{words}"):
        check_cover("layer.w", (4, 3), boxes)


def test_a_scalar_has_one_chunk() -> None:
    with pytest.raises(LayoutError, match="one chunk"):
        check_cover("scalar", (), [Box.whole(()), Box.whole(())])


def test_copies_on_one_rank_are_one_local_box() -> None:
    owners = tuple(Owner(rank=rank, local_index=index) for rank in (0, 1) for index in (3, 1))
    layout = TensorLayout(
        fqn="w", dtype="float32", global_shape=(4,), chunks=(Chunk(box=Box.whole((4,)), owners=owners),)
    )
    assert layout.local_boxes(0) == {1: Box.whole((4,))}
    assert layout.local_boxes(2) == {}


def test_a_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(LayoutError, match="rank 2"):
        Ranks(rank=2, world_size=2)
