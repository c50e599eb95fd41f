"""Which of many boxes cut a given one, without looking at each of them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stepkeeper_planners.boxes import Box

_FEW = 16
"""Up to here looking at each one is faster than any order."""

_BLOCK = 64
"""Boxes that are looked at together; neighbours in every dimension as far as there is such an order."""


class BoxIndex:
    """Boxes of one tensor, put in order once in O(n log n): then only those near the answer are looked at."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._ordered = len(boxes) > _FEW
        if not self._ordered:
            return
        starts = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), -1)
        ends = starts + np.array([box.sizes for box in boxes], dtype=np.int64).reshape(starts.shape)
        full = np.flatnonzero((starts < ends).all(axis=1))
        order = full[np.argsort(_neighbour_codes(starts[full]), kind="stable")]
        self._numbers, self._starts, self._ends = order, starts[order], ends[order]
        firsts = np.arange(0, len(order), _BLOCK)
        self._block_starts = np.minimum.reduceat(self._starts, firsts) if len(order) else self._starts
        self._block_ends = np.maximum.reduceat(self._ends, firsts) if len(order) else self._ends

    def cut_by(self, box: Box) -> list[tuple[int, Box]]:
        """The numbers of all boxes that have elements in common with this one, and those; in the boxes' order."""
        numbers = self._near(box) if self._ordered else range(len(self._boxes))
        cuts = ((number, box.intersect(self._boxes[number])) for number in numbers)
        return [(number, common) for number, common in cuts if common is not None]

    def _near(self, box: Box) -> list[int]:
        start, end = np.array(box.offsets), np.array(box.ends)
        blocks = np.flatnonzero(_meet(self._block_starts, self._block_ends, start, end))
        rows = (blocks[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
        rows = rows[rows < len(self._numbers)]
        hits = rows[_meet(self._starts[rows], self._ends[rows], start, end)]
        return sorted(self._numbers[hits].tolist())


def _meet(
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    start: npt.NDArray[np.int64],
    end: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    return np.asarray(((starts < end) & (ends > start)).all(axis=1))


def _neighbour_codes(starts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Morton numbers of the places on the grid of all starts: near numbers are near in every dimension."""
    codes = np.zeros(len(starts), dtype=np.int64)
    places = [np.unique(column, return_inverse=True)[1].astype(np.int64) for column in starts.T]
    places = [place for place in places if place.any()]
    for bit in range(62 // max(1, len(places))):
        for axis, place in enumerate(places):
            codes |= ((place >> bit) & 1) << (bit * len(places) + axis)
    return codes
