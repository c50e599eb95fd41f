"""Find two boxes that overlap: exact for boxes of any kind, and fast for those that shardings make.

Only the standard library is imported: the process that commits a checkpoint, and the command line, run without torch
and numpy.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Final, Protocol

__all__ = ["BoxLike", "find_overlap", "sweep"]

_MAX_PART_SHARE: Final = 0.75
"""The largest share of a group that one of its parts may have. Groups that part worse cost a sort for a few boxes."""

_NumberedBox = tuple[tuple[int, ...], tuple[int, ...], int]
"""Where a box starts and how long it is along each axis, and its number."""


class BoxLike(Protocol):
    """A box: where it starts and how far it goes, per dimension."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first index in it."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of indices in it."""
        ...


Search = Callable[[Sequence[BoxLike]], tuple[int, int] | None]


def sweep(boxes: Sequence[BoxLike]) -> tuple[int, int] | None:
    """Hold each box against those that it meets along one axis: quadratic where many do."""
    if not boxes[0].offsets:
        return 0, 1
    axis = max(range(len(boxes[0].offsets)), key=lambda axis: len({box.offsets[axis] for box in boxes}))
    alive: list[int] = []
    for number in sorted(range(len(boxes)), key=lambda number: boxes[number].offsets[axis]):
        box = boxes[number]
        start = box.offsets[axis]
        alive = [n for n in alive if boxes[n].offsets[axis] + boxes[n].sizes[axis] > start]
        for other in alive:
            if _have_overlap(boxes[other], box):
                return other, number
        alive.append(number)
    return None


def find_overlap(boxes: Sequence[BoxLike], search_rest: Search = sweep) -> tuple[int, int] | None:
    """Find two boxes that have an element in common.

    Shardings cut tensors by lines that cross no box. So the boxes are parted along such lines, by one axis after the
    other, until each is alone.

    Args:
        boxes: Boxes of one number of dimensions. Empty ones overlap none.
        search_rest: Finds two that overlap among boxes that hardly part so: at least two of them, none empty.

    Returns:
        The numbers of two that overlap, the lower first; None if no two do.
    """
    spans = [(box.offsets, box.sizes, number) for number, box in enumerate(boxes) if prod(box.sizes)]
    waiting = [(spans, 0, 0)] if len(spans) > 1 else []
    while waiting:
        group, axis, n_tried = waiting.pop()
        n_axes = len(group[0][0])
        if n_tried == n_axes:
            found = search_rest([boxes[number] for _, _, number in group])
            if found is not None:
                one, other = (group[place][2] for place in found)
                return min(one, other), max(one, other)
            continue
        for part in _split_along(group, axis):
            parts_well = len(part) <= _MAX_PART_SHARE * len(group)
            waiting.append((part, (axis + 1) % n_axes, 1 if parts_well else n_tried + 1))
    return None


def _split_along(group: list[_NumberedBox], axis: int) -> list[list[_NumberedBox]]:
    """Part boxes wherever all that start before have ended; leave out who is alone then."""
    parts: list[list[_NumberedBox]] = []
    part: list[_NumberedBox] = []
    end = 0
    for box in sorted(group, key=lambda box: box[0][axis]):
        start = box[0][axis]
        if start >= end:
            if len(part) > 1:
                parts.append(part)
            part = []
        part.append(box)
        end = max(end, start + box[1][axis])
    if len(part) > 1:
        parts.append(part)
    return parts


def _have_overlap(one: BoxLike, other: BoxLike) -> bool:
    axes = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + n and b < a + m for a, m, b, n in axes)
