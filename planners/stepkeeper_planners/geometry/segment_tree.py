"""Find which of many boxes overlap, all pairs or one, with a segment tree. Pure.

It is fast however the boxes lie. Where straight lines separate most boxes, as in shardings, `overlapping_pair` finds
one pair faster, and without numpy.

If two boxes overlap in one dimension, one of them starts inside the other there. A segment tree over the starts of one
dimension divides what each box covers into few ranges, and pairs the box with the boxes that start in these ranges. The
pairs are searched in the next dimension, with each side in both roles. This takes O(n log^d n) for d dimensions in
which boxes differ, plus the result, however the boxes lie.

Source: A. Zomorodian, H. Edelsbrunner, "Fast Software for Box Intersections", 2000.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.overlapping_pair import BoxLike

__all__ = ["OverlapSearch", "find_intersections"]

_FEW = 64
"""The number of boxes up to which they are compared directly with any number of others, without a tree."""

_FEW_PAIRS = 32
"""The number of pairs up to which they are compared one by one, without an array."""

_Ints = npt.NDArray[np.int64]


class OverlapSearch:
    """Search for an overlap when constructed; keep the result and the amount of work.

    The boxes have the same number of dimensions, and none is empty. `find_overlap` is faster where straight lines
    separate most of the boxes.
    """

    def __init__(self, boxes: Sequence[BoxLike]) -> None:
        self.n_visited = 0
        """The number of visits to boxes, plus the number of pairs that were compared."""
        self.found: tuple[int, int] | None = None
        """The numbers of two boxes that overlap, the lower first."""
        if len(boxes) > 1:
            tree = _Tree(*_corners(boxes))
            everyone = np.arange(len(boxes))
            self.found = next(tree.overlaps(everyone), None)
            self.n_visited = tree.n_visited


def find_intersections(queries: Sequence[Box], boxes: Sequence[Box]) -> list[list[tuple[int, Box]]]:
    """Find the boxes that each of `queries` overlaps.

    Returns:
        For each query: the numbers of these boxes, ascending, with the common part.
    """
    if len(queries) * len(boxes) <= _FEW_PAIRS:
        return [
            [
                (number, common)
                for number, box in enumerate(boxes)
                if (common := query.intersect(box)) is not None
            ]
            for query in queries
        ]
    starts, ends = _corners([*queries, *boxes])
    numbers = np.flatnonzero((starts < ends).all(axis=1))
    tree = _Tree(starts[numbers], ends[numbers])
    query_numbers, hits = tree.intersections(int(np.searchsorted(numbers, len(queries))))
    query_numbers, hits = numbers[query_numbers], numbers[hits]
    lows = np.maximum(starts[query_numbers], starts[hits])
    sizes = np.minimum(ends[query_numbers], ends[hits]) - lows
    found: list[list[tuple[int, Box]]] = [[] for _ in queries]
    hits -= len(queries)
    for query, number, low, size in zip(
        query_numbers.tolist(), hits.tolist(), lows.tolist(), sizes.tolist(), strict=True
    ):
        found[query].append((number, Box(offsets=tuple(low), sizes=tuple(size))))
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pairs:
    """All pairs of one box of each side. Both boxes overlap in all dimensions before `axis`."""

    covering: _Ints
    starting: _Ints
    """In a pair that overlaps along `axis`, the box that starts inside the other."""
    axis: int
    low: int
    high: int
    """The `starting` boxes start at the places from `low` to `high`. No box in `covering` covers more than these."""


class _Tree:
    """Non-empty boxes, by their corners."""

    def __init__(self, starts: _Ints, ends: _Ints) -> None:
        self.n_visited = 0
        self._n = len(starts)
        self._starts, self._ends, self._n_places = _on_grids(starts, ends)

    def overlaps(self, everyone: _Ints) -> Iterator[tuple[int, int]]:
        """Yield pairs of overlapping boxes: not all of them, but at least one if there is one."""
        if not self._n_places:
            # All boxes overlap in every dimension.
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

    def intersections(self, n_first: int) -> tuple[_Ints, _Ints]:
        """Return all overlapping pairs of one of the first `n_first` boxes and one of the others, in order."""
        first, others = np.arange(n_first), np.arange(n_first, self._n)
        if not self._n_places:
            return np.repeat(first, len(others)), np.tile(others, len(first))
        found = []
        for pairs in self._leaves([self._all(first, others), self._all(others, first)]):
            is_few = min(len(pairs.covering), len(pairs.starting)) <= _FEW
            ones, them = self._compared(pairs) if is_few else self._all_inside(pairs)
            found.append(np.minimum(ones, them) * self._n + np.maximum(ones, them))
        # Boxes that start at the same place are found in both roles.
        codes = np.unique(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)
        return codes // self._n, codes % self._n

    def _all(self, covering: _Ints, starting: _Ints) -> _Pairs:
        return _Pairs(covering=covering, starting=starting, axis=0, low=0, high=self._n_places[0])

    def _leaves(self, waiting: list[_Pairs]) -> Iterator[_Pairs]:
        """Divide the pairs until few boxes are on one side, or only the last dimension is left."""
        while waiting:
            pairs = waiting.pop()
            fewer = min(len(pairs.covering), len(pairs.starting))
            self.n_visited += len(pairs.covering) + len(pairs.starting)
            if not fewer:
                continue
            if fewer <= _FEW or pairs.axis == len(self._n_places) - 1:
                yield pairs
            else:
                waiting += self._divide(pairs)

    def _divide(self, pairs: _Pairs) -> list[_Pairs]:
        """Move boxes that cover the whole range to the next dimension; divide the range for the others."""
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
        """Find, in the last dimension, which boxes start inside each covering box.

        Returns:
            The starting boxes, sorted by start; the index of the first one inside each covering box; their numbers.
        """
        starts, ends = self._starts[pairs.axis], self._ends[pairs.axis]
        ordered = pairs.starting[np.argsort(starts[pairs.starting], kind="stable")]
        first = np.searchsorted(starts[ordered], starts[pairs.covering])
        return ordered, first, np.searchsorted(starts[ordered], ends[pairs.covering]) - first

    def _one_inside(self, pairs: _Pairs) -> tuple[_Ints, _Ints]:
        ordered, first, n_inside = self._inside(pairs)
        # Each box starts inside itself.
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
        self.n_visited += met.size
        for axis in range(pairs.axis, len(self._n_places)):
            starts, ends = self._starts[axis], self._ends[axis]
            met &= (starts[ones] < ends[others]) & (starts[others] < ends[ones])
        rows, columns = np.nonzero(met)
        return pairs.covering[rows], pairs.starting[columns]


def _corners(boxes: Sequence[BoxLike]) -> tuple[_Ints, _Ints]:
    starts = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), -1)
    return starts, starts + np.array([box.sizes for box in boxes], dtype=np.int64).reshape(starts.shape)


def _on_grids(starts: _Ints, ends: _Ints) -> tuple[list[_Ints], list[_Ints], list[int]]:
    """Replace starts and ends by their places among all starts, for each dimension that tells boxes apart.

    A dimension in which all boxes overlap is left out. Dimensions with few places come first: their trees are small.

    Returns:
        Starts, ends and the number of places, each by dimension.
    """
    grids: list[tuple[_Ints, _Ints, int]] = []
    for low, high in zip(starts.T, ends.T, strict=True):
        if len(low) and low.max() >= high.min():
            places = np.unique(low)
            grids.append((np.searchsorted(places, low), np.searchsorted(places, high), len(places)))
    grids.sort(key=lambda grid: grid[2])
    return [grid[0] for grid in grids], [grid[1] for grid in grids], [grid[2] for grid in grids]
