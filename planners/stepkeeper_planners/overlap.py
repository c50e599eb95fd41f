"""Whether any two of many boxes have an element in common, without holding each against each. Pure.

Boxes that meet in one dimension are such that one of them starts inside the other there. A segment tree over the starts
of one dimension pairs each box, as few ranges that it covers, with those that start in these ranges; what was paired is
searched in the next dimension, with both sides in both roles (A. Zomorodian, H. Edelsbrunner, "Fast Software for Box
Intersections", 2000). However the boxes lie, that is O(n log^d n) for d dimensions in which they differ.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepkeeper_planners.boxes import Box

__all__ = ["OverlapSearch", "find_overlap"]

_FEW = 64
"""Boxes that are held against any number of others directly: less than that isn't worth a tree."""

_Ints = npt.NDArray[np.int64]


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The numbers of two of these boxes that have an element in common, the lower first; None if no two have.

    The boxes are of one number of dimensions, and none is empty.
    """
    return OverlapSearch(boxes).found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pairs:
    """Each of the one with each of the other: they meet in all dimensions before this one."""

    covering: _Ints
    starting: _Ints
    """Of a pair that meets in this dimension, the one that starts inside the other."""
    axis: int
    low: int
    high: int
    """Where those start, as a range of places; nobody covers more than that any more."""


class OverlapSearch:
    """One search, done when it was made: what it found, and how much it looked at for that."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.n_looked_at = 0
        """Boxes, counted each time that they were looked at, and pairs that were held against one another."""
        self.found: tuple[int, int] | None = None
        if len(boxes) > 1:
            self._starts, self._ends, self._n_places = _on_grids(boxes)
            self.found = self._search(np.arange(len(boxes)))

    def _search(self, everyone: _Ints) -> tuple[int, int] | None:
        if not self._n_places:
            # In no dimension do they differ so that one could be beside another.
            return 0, 1
        waiting = [_Pairs(covering=everyone, starting=everyone, axis=0, low=0, high=self._n_places[0])]
        while waiting:
            pairs = waiting.pop()
            fewer = min(len(pairs.covering), len(pairs.starting))
            self.n_looked_at += len(pairs.covering) + len(pairs.starting)
            if fewer <= _FEW:
                found = self._compared(pairs)
            elif pairs.axis == len(self._n_places) - 1:
                found = self._on_a_line(pairs)
            else:
                waiting += self._parted(pairs)
                continue
            if found is not None:
                return min(found), max(found)
        return None

    def _parted(self, pairs: _Pairs) -> list[_Pairs]:
        """Who covers the range meets all that start there; the others go on in the halves of it."""
        axis, low, high = pairs.axis, pairs.low, pairs.high
        starts, ends = self._starts[axis], self._ends[axis]
        covers = (starts[pairs.covering] <= low) & (ends[pairs.covering] >= high)
        met, rest = pairs.covering[covers], pairs.covering[~covers]
        beyond = self._n_places[axis + 1]
        parts = [_Pairs(covering=met, starting=pairs.starting, axis=axis + 1, low=0, high=beyond)]
        if not np.array_equal(met, pairs.starting):
            parts.append(_Pairs(covering=pairs.starting, starting=met, axis=axis + 1, low=0, high=beyond))
        middle = (low + high) // 2
        for first, end in ((low, middle), (middle, high)) if len(rest) else ():
            covering = rest[(starts[rest] < end) & (ends[rest] > first)]
            places = starts[pairs.starting]
            starting = pairs.starting[(places >= first) & (places < end)]
            parts.append(_Pairs(covering=covering, starting=starting, axis=axis, low=first, high=end))
        return [part for part in parts if len(part.covering) and len(part.starting)]

    def _on_a_line(self, pairs: _Pairs) -> tuple[int, int] | None:
        """In the last dimension: sorted, those that start inside another are behind its start."""
        starts, ends = self._starts[pairs.axis], self._ends[pairs.axis]
        ordered = pairs.starting[np.argsort(starts[pairs.starting], kind="stable")]
        first = np.searchsorted(starts[ordered], starts[pairs.covering])
        inside = np.searchsorted(starts[ordered], ends[pairs.covering]) - first
        # Each starts inside of itself.
        others = inside - np.isin(pairs.covering, pairs.starting)
        hits = np.flatnonzero(others)
        if not len(hits):
            return None
        hit = hits[0]
        number = pairs.covering[hit]
        those = ordered[first[hit] : first[hit] + inside[hit]]
        return int(number), int(those[those != number][0])

    def _compared(self, pairs: _Pairs) -> tuple[int, int] | None:
        ones, others = pairs.covering[:, None], pairs.starting[None, :]
        met = ones != others
        self.n_looked_at += met.size
        for axis in range(pairs.axis, len(self._n_places)):
            starts, ends = self._starts[axis], self._ends[axis]
            met &= (starts[ones] < ends[others]) & (starts[others] < ends[ones])
        hits = np.argwhere(met)
        return (int(ones[hits[0][0], 0]), int(others[0, hits[0][1]])) if len(hits) else None


def _on_grids(boxes: Sequence[Box]) -> tuple[list[_Ints], list[_Ints], list[int]]:
    """Starts and ends as places among the starts of all, and how many those are; for each dimension that counts.

    In one in which all meet, nothing can be told apart. Dimensions with few places go first, the trees are small then.
    """
    starts = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), -1)
    ends = starts + np.array([box.sizes for box in boxes], dtype=np.int64).reshape(starts.shape)
    grids: list[tuple[_Ints, _Ints, int]] = []
    for low, high in zip(starts.T, ends.T, strict=True):
        if low.max() >= high.min():
            places = np.unique(low)
            grids.append((np.searchsorted(places, low), np.searchsorted(places, high), len(places)))
    grids.sort(key=lambda grid: grid[2])
    return [grid[0] for grid in grids], [grid[1] for grid in grids], [grid[2] for grid in grids]
