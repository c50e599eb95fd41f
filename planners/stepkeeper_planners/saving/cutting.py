"""Divide bytes evenly among ranks, and cut chunks along one axis, so that each rank writes its share of them.

A row of a box is its part at one index of that axis.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

from stepkeeper_planners.geometry.boxes import Box

__all__ = ["Cutter", "cut_by_shares", "level_shares"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutter:
    """Cut a box along one axis, into pieces of whole rows and of a minimum size."""

    axis: int
    n_rows: int
    row_bytes: int
    min_rows: int
    """The number of rows in the smallest piece."""

    @classmethod
    def for_box(cls, sizes: tuple[int, ...], element_bytes: int, min_bytes: int) -> "Cutter | None":
        """Choose the axis for a box of these sizes; None if it can't make two pieces of `min_bytes`.

        The axis is the first whose rows have at most `min_bytes`, so that pieces are contiguous, or nearly. If no axis
        has such rows, it is the longest.
        """
        total = prod(sizes) * element_bytes
        if total < 2 * min_bytes or not sizes:
            return None
        fine = (axis for axis, size in enumerate(sizes) if total // size <= min_bytes)
        axis = next(fine, max(range(len(sizes)), key=lambda a: sizes[a]))
        row_bytes = total // sizes[axis]
        min_rows = -(-min_bytes // row_bytes)
        if sizes[axis] < 2 * min_rows:
            return None
        return cls(axis=axis, n_rows=sizes[axis], row_bytes=row_bytes, min_rows=min_rows)

    def find_row(self, position_bytes: int, after: int) -> int:
        """Find the row, from `after` on, nearest to the position, that leaves no piece too small on either side."""
        nearest = (2 * position_bytes + self.row_bytes) // (2 * self.row_bytes)
        row = max(after, min(self.n_rows, nearest))
        n_before, n_left = row - after, self.n_rows - row
        if n_before + n_left < 2 * self.min_rows:
            # There aren't enough rows for two pieces.
            return after if n_before < n_left else self.n_rows
        # A piece that would be too small gets the minimum, or nothing if that is nearer.
        if n_before < self.min_rows:
            return after if 2 * n_before < self.min_rows else after + self.min_rows
        if n_left < self.min_rows:
            return self.n_rows if 2 * n_left < self.min_rows else self.n_rows - self.min_rows
        return row

    def cut_piece(self, box: Box, first: int, end: int) -> Box:
        """Return the part of the box from row `first` to before row `end`."""
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[self.axis] += first
        sizes[self.axis] = end - first
        return Box(offsets=tuple(offsets), sizes=tuple(sizes))


def cut_by_shares(
    boxes: Sequence[tuple[Box, Cutter]], shares: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, Box, int]]:
    """Yield pieces of the boxes: the index of the box, the part of it, and the rank that writes that part.

    The boxes are laid end to end, and each rank takes the next stretch. So there is at most one cut for each rank.
    `shares` are ranks, and the bytes that each should write. Their sum may differ from the bytes of the boxes.
    """
    ends = _find_share_ends(shares, sum(cutter.n_rows * cutter.row_bytes for _, cutter in boxes))
    share, start_bytes = 0, 0
    for index, (box, cutter) in enumerate(boxes):
        row, size_bytes = 0, cutter.n_rows * cutter.row_bytes
        while row < cutter.n_rows:
            takes_rest = share == len(shares) - 1 or ends[share] >= start_bytes + size_bytes
            end = cutter.n_rows if takes_rest else cutter.find_row(ends[share] - start_bytes, row)
            if end > row:
                yield index, cutter.cut_piece(box, row, end), shares[share][0]
            row = end
            if not takes_rest:
                share += 1
        start_bytes += size_bytes


def _find_share_ends(shares: Sequence[tuple[int, int]], total: int) -> list[int]:
    """Find the byte position at which each share ends, with all shares scaled so that they add up to `total`."""
    ends = list(accumulate(share for _, share in shares))
    # Without any share, the first rank gets all.
    return [end * total // ends[-1] if ends[-1] else total for end in ends]


def level_shares(
    groups: Sequence[tuple[tuple[int, ...], int]], fixed_bytes: Sequence[int]
) -> tuple[list[dict[int, int]], int]:
    """Divide the bytes of each group among its ranks, on top of the `fixed_bytes` that each rank writes anyway.

    A group is ranks that hold the same bytes, sorted, and the number of these bytes. Any of its ranks may write any of
    them. Return the bytes that each rank writes of each group, and the heaviest load that results.
    """
    loads = list(fixed_bytes)
    shares: list[dict[int, int]] = [{} for _ in groups]
    # The fewer ranks may write a group's bytes, the earlier they are divided.
    for index in sorted(range(len(groups)), key=lambda i: (len(groups[i][0]), groups[i][0])):
        shares[index] = _pour(*groups[index], loads)
    return shares, max(loads)


def _pour(holders: Sequence[int], size_bytes: int, loads: list[int]) -> dict[int, int]:
    """Fill up the group's least loaded holders to one level. Return the bytes for each, and add them to `loads`."""
    ranks = sorted(holders, key=lambda rank: (loads[rank], rank))
    n_filled, filled_load = 0, 0
    for rank in ranks:
        # All bytes are used before the level reaches this rank's load.
        if n_filled and loads[rank] * n_filled - filled_load >= size_bytes:
            break
        n_filled += 1
        filled_load += loads[rank]
    level, rest = divmod(size_bytes + filled_load, n_filled)
    poured = {}
    for place, rank in enumerate(ranks[:n_filled]):
        poured[rank] = level + (place < rest) - loads[rank]
        loads[rank] += poured[rank]
    return poured
