"""Which of many boxes have elements in common, without holding each against each. Pure.

Boxes that meet in one dimension are such that one of them starts inside the other there. A segment tree over the starts
of one dimension pairs each box, as few ranges that it covers, with those that start in these ranges; what was paired is
searched in the next dimension, with both sides in both roles (A. Zomorodian, H. Edelsbrunner, "Fast Software for Box
Intersections", 2000). However the boxes lie, that is O(n log^d n) for d dimensions in which they differ, and what is
found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.disjoint import Placed

__all__ = ["OverlapSearch", "common_parts"]

_FEW = 64
"""Boxes that are held against any number of others directly: less than that isn't worth a tree."""

_FEW_PAIRS = 32
"""And pairs of which each is looked at by itself: less than that isn't worth an array."""

_Ints = npt.NDArray[np.int64]


class OverlapSearch:
    """One search for an overlap, done when it was made: what it found, and how much it looked at for that.

    The boxes are of one number of dimensions, and none is empty. `find_overlap` finds it sooner where straight lines
    part most of them.
    """

    def __init__(self, boxes: Sequence[Placed]) -> None:
        self.n_looked_at = 0
        """Boxes, counted each time that they were looked at, and pairs that were held against one another."""
        self.found: tuple[int, int] | None = None
        """The numbers of two boxes that overlap, the lower first."""
        if len(boxes) > 1:
            tree = _Tree(*_corners(boxes))
            everyone = np.arange(len(boxes))
            self.found = next(tree.overlaps(everyone), None)
            self.n_looked_at = tree.n_looked_at


def common_parts(asking: Sequence[Box], boxes: Sequence[Box]) -> list[list[tuple[int, Box]]]:
    """For each box that asks, the numbers of those boxes that have elements in common with it, in order, and which."""
    if len(asking) * len(boxes) <= _FEW_PAIRS:
        return [
            [
                (number, common)
                for number, box in enumerate(boxes)
                if (common := asked.intersect(box)) is not None
            ]
            for asked in asking
        ]
    starts, ends = _corners([*asking, *boxes])
    numbers = np.flatnonzero((starts < ends).all(axis=1))
    tree = _Tree(starts[numbers], ends[numbers])
    askers, hits = tree.meetings(int(np.searchsorted(numbers, len(asking))))
    askers, hits = numbers[askers], numbers[hits]
    lows = np.maximum(starts[askers], starts[hits])
    sizes = np.minimum(ends[askers], ends[hits]) - lows
    found: list[list[tuple[int, Box]]] = [[] for _ in asking]
    hits -= len(asking)
    for asker, number, low, size in zip(
        askers.tolist(), hits.tolist(), lows.tolist(), sizes.tolist(), strict=True
    ):
        found[asker].append((number, Box(offsets=tuple(low), sizes=tuple(size))))
    return found


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


class _Tree:
    """Boxes that are not empty, by their corners."""

    def __init__(self, starts: _Ints, ends: _Ints) -> None:
        self.n_looked_at = 0
        self._n = len(starts)
        self._starts, self._ends, self._n_places = _on_grids(starts, ends)

    def overlaps(self, everyone: _Ints) -> Iterator[tuple[int, int]]:
        """Pairs of two of these that meet; not all of them, but at least one if there is one."""
        if not self._n_places:
            # In no dimension do they differ so that one could be beside another.
            yield 0, 1
            return
        for pairs in self._leaves([self._all(everyone, everyone)]):
            if min(len(pairs.covering), len(pairs.starting)) <= _FEW:
                ones, others = self._compared(pairs)
                ones, others = ones[ones != others], others[ones != others]
            else:
                ones, others = self._one_inside(pairs)
            if len(ones):
                yield min(int(ones[0]), int(others[0])), max(int(ones[0]), int(others[0]))

    def meetings(self, n_first: int) -> tuple[_Ints, _Ints]:
        """All pairs of one of the first so many and one of the others that meet, in order."""
        first, others = np.arange(n_first), np.arange(n_first, self._n)
        if not self._n_places:
            return np.repeat(first, len(others)), np.tile(others, len(first))
        found = []
        for pairs in self._leaves([self._all(first, others), self._all(others, first)]):
            is_few = min(len(pairs.covering), len(pairs.starting)) <= _FEW
            ones, them = self._compared(pairs) if is_few else self._all_inside(pairs)
            found.append(np.minimum(ones, them) * self._n + np.maximum(ones, them))
        # What starts at the same place is in both roles.
        codes = np.unique(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)
        return codes // self._n, codes % self._n

    def _all(self, covering: _Ints, starting: _Ints) -> _Pairs:
        return _Pairs(covering=covering, starting=starting, axis=0, low=0, high=self._n_places[0])

    def _leaves(self, waiting: list[_Pairs]) -> Iterator[_Pairs]:
        """Parted until few are on one side, or only the last dimension is left."""
        while waiting:
            pairs = waiting.pop()
            fewer = min(len(pairs.covering), len(pairs.starting))
            self.n_looked_at += len(pairs.covering) + len(pairs.starting)
            if not fewer:
                continue
            if fewer <= _FEW or pairs.axis == len(self._n_places) - 1:
                yield pairs
            else:
                waiting += self._parted(pairs)

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
        return parts

    def _inside(self, pairs: _Pairs) -> tuple[_Ints, _Ints, _Ints]:
        """In the last dimension: those that start, sorted; where those inside each covering one begin, and how many."""
        starts, ends = self._starts[pairs.axis], self._ends[pairs.axis]
        ordered = pairs.starting[np.argsort(starts[pairs.starting], kind="stable")]
        first = np.searchsorted(starts[ordered], starts[pairs.covering])
        return ordered, first, np.searchsorted(starts[ordered], ends[pairs.covering]) - first

    def _one_inside(self, pairs: _Pairs) -> tuple[_Ints, _Ints]:
        ordered, first, n_inside = self._inside(pairs)
        # Each starts inside of itself.
        hits = np.flatnonzero(n_inside - np.isin(pairs.covering, pairs.starting))[:1]
        if not len(hits):
            return hits, hits
        ones = pairs.covering[hits]
        those = ordered[first[hits[0]] :][:2]
        return ones, those[those != ones][:1]

    def _all_inside(self, pairs: _Pairs) -> tuple[_Ints, _Ints]:
        ordered, first, n_inside = self._inside(pairs)
        behind = np.cumsum(n_inside)
        places = np.arange(behind[-1]) - np.repeat(behind - n_inside - first, n_inside)
        return np.repeat(pairs.covering, n_inside), ordered[places]

    def _compared(self, pairs: _Pairs) -> tuple[_Ints, _Ints]:
        ones, others = pairs.covering[:, None], pairs.starting[None, :]
        met = np.ones((len(pairs.covering), len(pairs.starting)), dtype=bool)
        self.n_looked_at += met.size
        for axis in range(pairs.axis, len(self._n_places)):
            starts, ends = self._starts[axis], self._ends[axis]
            met &= (starts[ones] < ends[others]) & (starts[others] < ends[ones])
        rows, columns = np.nonzero(met)
        return pairs.covering[rows], pairs.starting[columns]


def _corners(boxes: Sequence[Placed]) -> tuple[_Ints, _Ints]:
    starts = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), -1)
    return starts, starts + np.array([box.sizes for box in boxes], dtype=np.int64).reshape(starts.shape)


def _on_grids(starts: _Ints, ends: _Ints) -> tuple[list[_Ints], list[_Ints], list[int]]:
    """Starts and ends as places among the starts of all, and how many those are; for each dimension that counts.

    In one in which all meet, nothing can be told apart. Dimensions with few places go first, the trees are small then.
    """
    grids: list[tuple[_Ints, _Ints, int]] = []
    for low, high in zip(starts.T, ends.T, strict=True):
        if len(low) and low.max() >= high.min():
            places = np.unique(low)
            grids.append((np.searchsorted(places, low), np.searchsorted(places, high), len(places)))
    grids.sort(key=lambda grid: grid[2])
    return [grid[0] for grid in grids], [grid[1] for grid in grids], [grid[2] for grid in grids]
