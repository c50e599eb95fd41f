"""Whether boxes tile a tensor: exact, for boxes of any kind, and fast for those that shardings make."""

from collections.abc import Sequence
from math import prod

__all__ = ["Box", "overlap"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it starts, and how long it is, along each axis."""


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two of the boxes that have an element in common; None if there are none."""
    # Parted along every line that crosses no box, by one axis after the other, until each is alone: shardings cut
    # tensors by such lines. Only boxes that no such line parts are compared with one another.
    waiting = [([box for box in boxes if prod(box[1])], 0, 0)]
    while waiting:
        group, axis, n_tried = waiting.pop()
        if len(group) < 2:
            continue
        n_axes = len(group[0][0])
        if n_tried == n_axes:
            found = _among(group)
            if found is not None:
                return found
            continue
        parts = _parted(group, axis)
        tried = n_tried + 1 if len(parts) == 1 else 1
        waiting.extend((part, (axis + 1) % n_axes, tried) for part in parts)
    return None


def _parted(boxes: list[Box], axis: int) -> list[list[Box]]:
    """The boxes in order of where they start, anew wherever all that came before have ended."""
    parts: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        if box[0][axis] >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, box[0][axis] + box[1][axis])
    return parts


def _among(boxes: list[Box]) -> tuple[Box, Box] | None:
    if not boxes[0][0]:
        return boxes[0], boxes[1]
    axis = max(range(len(boxes[0][0])), key=lambda a: len({box[0][a] for box in boxes}))
    alive: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        alive = [other for other in alive if other[0][axis] + other[1][axis] > box[0][axis]]
        for other in alive:
            if _meet(other, box):
                return other, box
        alive.append(box)
    return None


def _meet(one: Box, other: Box) -> bool:
    axes = zip(*one, *other, strict=True)
    return all(a < b + n and b < a + m for a, m, b, n in axes)
