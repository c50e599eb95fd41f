"""Compute with boxes: parts of a tensor from one index to another in each dimension. All plans are made of them."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from operator import add, sub

from stepkeeper_planners.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Box:
    """A part of a tensor: its offset and its size in each dimension. Both are empty for a 0-dim tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        got = f"got offsets {self.offsets}, sizes {self.sizes}"
        if len(self.offsets) != len(self.sizes):
            raise LayoutError(f"a box has one size per offset, {got}")
        if min((*self.offsets, *self.sizes), default=0) < 0:
            raise LayoutError(f"a box has no negative numbers, {got}")

    @staticmethod
    @lru_cache(maxsize=1024)
    def whole(shape: tuple[int, ...]) -> "Box":
        """Return the box of all elements of a tensor of this shape. Tensors of few shapes share few boxes."""
        return Box(offsets=(0,) * len(shape), sizes=tuple(shape))

    @property
    def volume(self) -> int:
        """The number of elements; 1 for the box of a 0-dim tensor."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """The first index after the box, per dimension."""
        return tuple(map(add, self.offsets, self.sizes))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that index this box in a tensor or array."""
        return tuple(slice(start, end) for start, end in zip(self.offsets, self.ends, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """Return the common part, if any. Raises LayoutError for different numbers of dimensions."""
        if len(self.offsets) != len(other.offsets):
            raise LayoutError(
                f"boxes of one tensor have the same number of dimensions, got {self} and {other}"
            )
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(map(min, self.ends, other.ends))
        if any(end <= start for start, end in zip(starts, ends, strict=True)):
            return None
        return Box(offsets=starts, sizes=tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def contains(self, other: "Box") -> bool:
        """Return whether the other box lies entirely inside this one."""
        starts_inside = all(map(int.__le__, self.offsets, other.offsets))
        return starts_inside and all(map(int.__ge__, self.ends, other.ends))

    def relative_to(self, origin: tuple[int, ...]) -> "Box":
        """Return the same box, with offsets counted from `origin`."""
        return Box(offsets=tuple(map(sub, self.offsets, origin)), sizes=self.sizes)
