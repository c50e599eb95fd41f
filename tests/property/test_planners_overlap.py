"""No overlap is overlooked and none is made up, whatever the boxes."""

import random
from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import scaled

from stepkeeper_planners.errors import LayoutError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.cover import check_cover
from stepkeeper_planners.geometry.overlapping_pair import find_overlap
from stepkeeper_planners.loading.resharding import find_intersections


def box(*spans: tuple[int, int]) -> Box:
    return Box(offsets=tuple(a for a, _ in spans), sizes=tuple(b - a for a, b in spans))


def spiral(n_boxes: int) -> tuple[tuple[int, ...], list[Box]]:
    """Rings of four boxes around one another, each ring turning: no straight line parts any of them from the rest."""
    n_rings = n_boxes // 4
    side = 2 * n_rings + 1
    boxes = [box((n_rings, n_rings + 1), (n_rings, n_rings + 1))]
    for low in range(n_rings):
        high = side - low
        boxes += [
            box((low, low + 1), (low, high - 1)),
            box((low, high - 1), (high - 1, high)),
            box((high - 1, high), (low + 1, high)),
            box((low + 1, high), (low, low + 1)),
        ]
    return (side, side), boxes


def slats(n_boxes: int) -> tuple[tuple[int, ...], list[Box]]:
    """Slats that all lie side by side in one dimension and all meet in the other."""
    return (n_boxes, 5), [box((number, number + 1), (0, 5)) for number in range(n_boxes)]


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


@settings(deadline=None, max_examples=scaled(60))
@given(st.sampled_from([spiral, slats]), st.integers(8, 700), st.randoms(use_true_random=False))
def test_one_change_in_a_tiling_is_seen(
    tiling: Callable[[int], tuple[tuple[int, ...], list[Box]]], n_boxes: int, chance: random.Random
) -> None:
    shape, boxes = tiling(n_boxes)
    chance.shuffle(boxes)
    check_cover("w", shape, boxes)
    number, axis = chance.randrange(len(boxes)), chance.randrange(len(shape))
    moved = boxes[number]
    offsets = list(moved.offsets)
    offsets[axis] += 1 if moved.ends[axis] < shape[axis] else -1
    if offsets[axis] < 0:
        return
    boxes[number] = Box(offsets=tuple(offsets), sizes=moved.sizes)
    with pytest.raises(LayoutError, match=r"w: .*overlap"):
        check_cover("w", shape, boxes)
    del boxes[number]
    with pytest.raises(LayoutError, match=r"w: the chunks hold \d+ of"):
        check_cover("w", shape, boxes)


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
