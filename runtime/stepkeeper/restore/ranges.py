"""Convert a range of bytes of a stored array into boxes, and find which of them are wanted. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from operator import add, lt

__all__ = ["Array", "Copy"]

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One box of bytes to copy: from a part of the range, read as an array of `source_shape`, into the wanted box."""

    source_start: int
    """The byte of the range at which that part begins."""

    source_shape: Ints
    source_box: tuple[slice, ...]
    """The box to copy, in the array of `source_shape`."""

    target_box: tuple[slice, ...]
    """The place to copy it to, in the wanted box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """The bytes of a row-major array, and the box of them that is wanted.

    The last dimension is the bytes of one element, so elements of any size may be cut anywhere.
    """

    sizes: Ints
    offsets: Ints
    """The indices at which the wanted box begins."""

    lengths: Ints
    """The shape of the wanted box; none of them is 0."""

    @property
    def n_bytes(self) -> int:
        """The number of wanted bytes."""
        return prod(self.lengths)

    @property
    def span(self) -> range:
        """The range from the first wanted byte to the last. Others may lie between them."""
        first = last = 0
        for size, offset, length in zip(self.sizes, self.offsets, self.lengths, strict=True):
            first = first * size + offset
            last = last * size + offset + length - 1
        return range(first, last + 1)

    @property
    def is_one_range(self) -> bool:
        """True if all bytes of `span` are wanted."""
        return len(self.span) == self.n_bytes

    def copies(self, start: int, end: int) -> Iterator[Copy]:
        """Yield the copies to make of the bytes from `start` to before `end`, each wanted byte once."""
        for lead, shape, first in _boxes(self.sizes, start, end, 0):
            # The box begins at `lead`, then 0. It has length 1 in all dimensions of `lead` but the last, then `shape`.
            depth = len(lead) - 1
            offsets = (*lead, *(0,) * (len(shape) - 1))
            lengths = (*(1,) * depth, *shape)
            # The part that is in the wanted box too.
            starts = tuple(map(max, offsets, self.offsets))
            box_ends = map(add, offsets, lengths)
            ends = tuple(map(min, box_ends, map(add, self.offsets, self.lengths)))
            if all(map(lt, starts, ends)):
                yield Copy(
                    source_start=first - start,
                    source_shape=lengths,
                    source_box=_slices(starts, ends, offsets),
                    target_box=_slices(starts, ends, self.offsets),
                )


def _slices(starts: Ints, ends: Ints, origin: Ints) -> tuple[slice, ...]:
    return tuple(slice(s - o, e - o) for s, e, o in zip(starts, ends, origin, strict=True))


def _boxes(sizes: Ints, start: int, end: int, base: int) -> Iterator[tuple[Ints, Ints, int]]:
    """Divide the bytes from `start` to before `end` of an array of these sizes into boxes of whole rows.

    Yields for each box: the indices at which it begins, down to the dimension that it is a range of; its shape from
    that dimension on; and its first byte. `base` is the first byte of the array.
    """
    if start >= end:
        return
    row = prod(sizes[1:])
    if len(sizes) == 1 or (start % row == 0 and end % row == 0):
        yield (start // row,), ((end - start) // row, *sizes[1:]), base + start
        return
    # A part of a row at the start, whole rows, and a part of a row at the end; any of them may be missing.
    first, last = -(-start // row), end // row
    if first > last:
        # The range begins and ends within row `last`.
        yield from _below(sizes, last, start, end, base)
        return
    if start < first * row:
        yield from _below(sizes, first - 1, start, first * row, base)
    if first < last:
        yield (first,), (last - first, *sizes[1:]), base + first * row
    if last * row < end:
        yield from _below(sizes, last, last * row, end, base)


def _below(sizes: Ints, index: int, start: int, end: int, base: int) -> Iterator[tuple[Ints, Ints, int]]:
    """Divide a range that lies in row `index` into boxes of that row."""
    row_start = index * prod(sizes[1:])
    for lead, shape, first in _boxes(sizes[1:], start - row_start, end - row_start, base + row_start):
        yield (index, *lead), shape, first
