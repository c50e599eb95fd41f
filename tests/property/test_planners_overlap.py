"""No overlap is overlooked and none is made up, whatever the boxes."""

import random
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import scaled

from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.overlapping_pair import find_overlap
from stepkeeper_planners.loading.resharding import find_intersections


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
