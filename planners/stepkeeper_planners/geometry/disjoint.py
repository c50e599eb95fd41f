"""Find two boxes that overlap: exact for boxes of any kind, and fast for those that shardings make.

Only the standard library is imported: the process that commits a checkpoint, and the command line, run without torch
and numpy.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

__all__ = ["Placed", "find_overlap", "sweep"]

_PARTED_WELL: Final = 0.75
"""The largest share of a group that one of its parts may have. Groups that part worse cost a sort for a few boxes."""


class Placed(Protocol):
    """A box: where it starts and how far it goes, per dimension."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first index in it."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of indices in it."""
        ...


Search = Callable[[Sequence[Placed]], tuple[int, int] | None]


def sweep(boxes: Sequence[Placed]) -> tuple[int, int] | None:
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
            if _meet(boxes[other], box):
                return other, number
        alive.append(number)
    return None


def find_overlap(boxes: Sequence[Placed], search_rest: Search = sweep) -> tuple[int, int] | None:
    """Find two boxes that have an element in common.

    Shardings cut tensors by lines that cross no box. So the boxes are parted along such lines, by one axis after the
    other, until each is alone.

    Args:
        boxes: Boxes of one number of dimensions. Empty ones overlap none.
        search_rest: Finds two that overlap among boxes that hardly part so: at least two of them, none empty.

    Returns:
        The numbers of two that overlap, the lower first; None if no two do.
    """
    full = [number for number, box in enumerate(boxes) if 0 not in box.sizes]
    if len(full) < 2:
        return None
    n_axes = len(boxes[full[0]].offsets)
    # By axis: sorting by a list's own items is several times as fast as by what a function finds in each box.
    lows = [[box.offsets[axis] for box in boxes] for axis in range(n_axes)]
    highs = [[box.offsets[axis] + box.sizes[axis] for box in boxes] for axis in range(n_axes)]
    waiting = [(full, 0, 0)]
    while waiting:
        group, axis, n_tried = waiting.pop()
        if n_tried == n_axes:
            found = search_rest([boxes[number] for number in group])
            if found is not None:
                one, other = (group[place] for place in found)
                return min(one, other), max(one, other)
            continue
        for part in _parted(group, lows[axis], highs[axis]):
            parts_well = len(part) <= _PARTED_WELL * len(group)
            waiting.append((part, (axis + 1) % n_axes, 1 if parts_well else n_tried + 1))
    return None


def _parted(group: list[int], lows: list[int], highs: list[int]) -> list[list[int]]:
    """Part boxes wherever all that start before have ended; leave out who is alone then."""
    parts: list[list[int]] = []
    ordered = sorted(group, key=lows.__getitem__)
    first, end = 0, 0
    for place, number in enumerate(ordered):
        if lows[number] >= end:
            if place - first > 1:
                parts.append(ordered[first:place])
            first = place
        end = max(end, highs[number])
    if len(ordered) - first > 1:
        parts.append(ordered[first:])
    return parts


def _meet(one: Placed, other: Placed) -> bool:
    axes = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + n and b < a + m for a, m, b, n in axes)
