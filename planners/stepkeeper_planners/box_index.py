"""Which of many boxes cut which of many others, without holding each against each."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stepkeeper_planners.boxes import Box

_FEW: Final = 32
"""Pairs of boxes up to which looking at each is faster than any order."""

_BLOCK: Final = 64
"""Boxes that are looked at together: neighbours in every dimension, as far as there is such an order."""

_Ints = npt.NDArray[np.int64]


def common_parts(asking: Sequence[Box], boxes: Sequence[Box]) -> list[list[tuple[int, Box]]]:
    """For each box that asks, the numbers of those boxes that have elements in common with it, in order, and which.

    In O(n log n) and what is found, as long as neither the one nor the other overlap much among themselves.
    """
    if len(asking) * len(boxes) > _FEW:
        return _found_in_blocks(asking, boxes)
    return [
        [(number, common) for number, box in enumerate(boxes) if (common := asked.intersect(box)) is not None]
        for asked in asking
    ]


def _found_in_blocks(asking: Sequence[Box], boxes: Sequence[Box]) -> list[list[tuple[int, Box]]]:
    found: list[list[tuple[int, Box]]] = [[] for _ in asking]
    index = _Blocks(boxes)
    if not len(index.numbers):
        return found
    askers = _Blocks(asking)
    for first in range(0, len(askers.numbers), _BLOCK):
        block = slice(first, first + _BLOCK)
        for asker, number, common in index.cut_by(askers.starts[block], askers.ends[block]):
            found[askers.numbers[first + asker]].append((number, common))
    return found


class _Blocks:
    """The boxes that have elements, neighbours beside one another, and what is around each block of them."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        starts = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), -1)
        ends = starts + np.array([box.sizes for box in boxes], dtype=np.int64).reshape(starts.shape)
        full = np.flatnonzero((starts < ends).all(axis=1))
        order = full[np.argsort(_neighbour_codes(starts[full]), kind="stable")]
        self.numbers, self.starts, self.ends = order, starts[order], ends[order]
        if len(order):
            firsts = np.arange(0, len(order), _BLOCK)
            self._around_starts = np.minimum.reduceat(self.starts, firsts)
            self._around_ends = np.maximum.reduceat(self.ends, firsts)

    def cut_by(self, starts: _Ints, ends: _Ints) -> Iterator[tuple[int, int, Box]]:
        """Who asks, the number of a box that it cuts, and the common part; in the order of both."""
        start, end = starts.min(axis=0), ends.max(axis=0)
        blocks = np.flatnonzero(((self._around_starts < end) & (self._around_ends > start)).all(axis=1))
        rows = (blocks[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
        rows = rows[rows < len(self.numbers)]
        rows = rows[((self.starts[rows] < end) & (self.ends[rows] > start)).all(axis=1)]
        rows = rows[np.argsort(self.numbers[rows])]
        met = (self.starts[rows] < ends[:, None]) & (self.ends[rows] > starts[:, None])
        askers, hits = np.nonzero(met.all(axis=2))
        lows = np.maximum(self.starts[rows[hits]], starts[askers])
        sizes = np.minimum(self.ends[rows[hits]], ends[askers]) - lows
        numbers = self.numbers[rows[hits]]
        found = zip(askers.tolist(), numbers.tolist(), lows.tolist(), sizes.tolist(), strict=True)
        for asker, number, low, size in found:
            yield asker, number, Box(offsets=tuple(low), sizes=tuple(size))


def _neighbour_codes(starts: _Ints) -> _Ints:
    """Morton numbers of the places on the grid of all starts: near numbers are near in every dimension."""
    codes = np.zeros(len(starts), dtype=np.int64)
    places = [np.unique(column, return_inverse=True)[1].astype(np.int64) for column in starts.T]
    places = [place for place in places if place.any()]
    for bit in range(62 // max(1, len(places))):
        for axis, place in enumerate(places):
            codes |= ((place >> bit) & 1) << (bit * len(places) + axis)
    return codes
