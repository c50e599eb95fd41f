"""Box arithmetic and the check that chunks make up a tensor."""

import pytest

from stepkeeper_planners.errors import LayoutError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.cover import check_cover
from stepkeeper_planners.geometry.layout import Ranks


def box(*pairs: tuple[int, int]) -> Box:
    return Box(offsets=tuple(start for start, _ in pairs), sizes=tuple(size for _, size in pairs))


def test_boxes_of_different_dimensions_are_not_compared() -> None:
    with pytest.raises(LayoutError, match="same number of dimensions"):
        box((0, 1)).intersect(Box.whole(()))


@pytest.mark.parametrize(("offsets", "sizes"), [((0,), ()), ((-1,), (1,)), ((0,), (-1,))])
def test_a_malformed_box_is_refused(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError):
        Box(offsets=offsets, sizes=sizes)


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


def test_a_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(LayoutError, match="rank 2"):
        Ranks(rank=2, world_size=2)
