"""Find one pair of boxes that overlap, by cutting along straight lines that cross no box.

The search is exact for all boxes, and fast for those that shardings make, since these are cut along such lines. Only
the standard library is imported: the process that commits a checkpoint, and the command line, run without torch.
"""

from collections.abc import Sequence
from typing import Final, Protocol

__all__ = ["BoxLike", "find_overlap"]

_MAX_PART_SHARE: Final = 0.75
"""The largest share of a group that a part of it may have if the split is to count as progress. With larger parts, each
sort would separate only a few boxes."""


class BoxLike(Protocol):
    """A box, as offsets and sizes in elements, one for each dimension."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """The indices of its first element."""
        ...

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its length along each dimension."""
        ...


def _sweep(boxes: Sequence[BoxLike]) -> tuple[int, int] | None:
    """Find two boxes that overlap. Compare each with those that it overlaps along one axis: quadratic if many do."""
    if not boxes[0].offsets:
        # All boxes of a 0-dim tensor are its one element.
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


def find_overlap(boxes: Sequence[BoxLike]) -> tuple[int, int] | None:
    """Find two boxes with a common element, by number, the lower first; None if there are none.

    The boxes are separated along one axis after another, until each is alone. Boxes that no axis separates well are
    compared in pairs.
    """
    # Boxes without elements overlap nothing.
    full = [number for number, box in enumerate(boxes) if 0 not in box.sizes]
    if len(full) < 2:
        return None
    n_axes = len(boxes[full[0]].offsets)
    # By axis: sorting by a list's own items is several times as fast as by what a function finds in each box.
    lows = [[box.offsets[axis] for box in boxes] for axis in range(n_axes)]
    highs = [[box.offsets[axis] + box.sizes[axis] for box in boxes] for axis in range(n_axes)]
    # Groups of boxes, each with the next axis to try and the number of axes tried in a row without progress.
    waiting = [(full, 0, 0)]
    while waiting:
        group, axis, n_tried = waiting.pop()
        if n_tried == n_axes:
            found = _sweep([boxes[number] for number in group])
            if found is not None:
                one, other = (group[place] for place in found)
                return min(one, other), max(one, other)
            continue
        for part in _split_along(group, lows[axis], highs[axis]):
            has_progress = len(part) <= _MAX_PART_SHARE * len(group)
            # 1, not 0: this axis can't separate its own part again.
            waiting.append((part, (axis + 1) % n_axes, 1 if has_progress else n_tried + 1))
    return None


def _split_along(group: list[int], lows: list[int], highs: list[int]) -> list[list[int]]:
    """Separate the boxes wherever all that start before have ended; leave out each that is alone."""
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


def _have_overlap(one: BoxLike, other: BoxLike) -> bool:
    axes = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + n and b < a + m for a, m, b, n in axes)
