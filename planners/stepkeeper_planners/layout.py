"""How a tensor lies over ranks: which boxes, and who holds a copy of each. Pure; every rank computes the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from stepkeeper_planners.boxes import Box
from stepkeeper_planners.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Who am I among how many processes that save and load together."""

    rank: int
    world_size: int
    members: tuple[int, ...] | None = None
    """The numbers that these processes have in the default process group, by rank; None where those are their ranks."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise LayoutError(f"rank {self.rank} is not one of {self.world_size} ranks")


def ranks_among(rank: int, members: Sequence[int]) -> Ranks:
    """One of these processes, which are given by their numbers in the default process group, by rank."""
    numbered = tuple(members) == tuple(range(len(members)))
    return Ranks(rank=rank, world_size=len(members), members=None if numbered else tuple(members))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Owner:
    """A copy of a chunk: the rank that holds it, and which of that rank's local shards it is."""

    rank: int
    local_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of a tensor with all its copies, at least one."""

    box: Box
    owners: tuple[Owner, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """A whole tensor: its chunks are disjoint and cover it, unless it is said not to be complete."""

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    complete: bool = True
    """False: only this rank's chunks are here, nobody knows the others'. `join.join_layouts` makes one of them."""
    siblings: tuple[tuple[int, ...], ...] = ()
    """The ranks of each slice of a mesh on which the tensor lies by itself, if there are several."""

    def local_boxes(self, rank: int) -> dict[int, Box]:
        """What this rank holds: the lowest local index of each distinct box that it has a copy of.

        Further copies on the same rank are left out: they are never read or written separately.
        """
        boxes: dict[int, Box] = {}
        for chunk in self.chunks:
            local = [owner.local_index for owner in chunk.owners if owner.rank == rank]
            if local:
                boxes[min(local)] = chunk.box
        return boxes


@lru_cache(maxsize=8)
def one_copy_per_rank(world_size: int) -> tuple[Owner, ...]:
    """The owners of what every rank holds whole. One shared tuple: there may be many such tensors and ranks."""
    return tuple(Owner(rank=rank, local_index=0) for rank in range(world_size))


def whole_tensor(fqn: str, dtype: str, shape: Sequence[int], ranks: Ranks) -> TensorLayout:
    """The layout of a tensor that every rank holds whole."""
    chunk = Chunk(box=Box.whole(tuple(shape)), owners=one_copy_per_rank(ranks.world_size))
    return TensorLayout(fqn=fqn, dtype=dtype, global_shape=tuple(shape), chunks=(chunk,))


def check_cover(fqn: str, global_shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """The boxes are inside the tensor, disjoint, and leave no element out. In O(n log n) for what shardings make.

    Raises:
        LayoutError: they are not; it names the tensor and the boxes.
    """
    whole = Box.whole(global_shape)
    if len(boxes) == 1 and boxes[0] == whole:
        return
    for box in boxes:
        if len(box.offsets) != len(global_shape) or not whole.contains(box):
            raise LayoutError(f"{fqn}: chunk {box} is not inside the shape {global_shape}")
    check_disjoint(fqn, [box for box in boxes if box.volume])
    covered = sum(box.volume for box in boxes)
    if covered != whole.volume:
        raise LayoutError(
            f"{fqn}: the chunks hold {covered} of {whole.volume} elements of shape {global_shape}"
        )


def check_disjoint(fqn: str, boxes: list[Box]) -> None:
    """No two of these boxes, none of them empty, have an element in common.

    Raises:
        LayoutError: two have; it names the tensor and both.
    """
    # Parted along every line that crosses no box, by one axis after the other, until each is alone. Only boxes that
    # no such line parts are compared with one another. Shardings cut tensors by such lines.
    n_axes = len(boxes[0].offsets) if boxes else 0
    waiting = [(boxes, 0, 0)]
    while waiting:
        group, axis, n_tried = waiting.pop()
        if len(group) < 2:
            continue
        if n_tried == n_axes:
            _compare_all(fqn, group)
            continue
        parts = _parted(group, axis)
        following = (axis + 1) % n_axes
        if len(parts) == 1:
            waiting.append((parts[0], following, n_tried + 1))
        else:
            # Within a part this axis can't part again before another one has.
            waiting.extend((part, following, 1) for part in parts)


def _parted(boxes: list[Box], axis: int) -> list[list[Box]]:
    """The boxes in order of where they start, anew wherever all that came before have ended."""
    ordered = sorted(((box.offsets[axis], box) for box in boxes), key=itemgetter(0))
    parts: list[list[Box]] = []
    end = -1
    for start, box in ordered:
        if start >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, start + box.sizes[axis])
    return parts


def _compare_all(fqn: str, boxes: list[Box]) -> None:
    """Sweep along the axis with the most distinct starts; only boxes alive at once are compared."""
    axis = max(
        range(len(boxes[0].offsets)), key=lambda a: len({box.offsets[a] for box in boxes}), default=None
    )
    if axis is None:
        raise LayoutError(f"{fqn}: a 0-dim tensor has one chunk, got {len(boxes)}")
    alive: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets[axis]):
        alive = [other for other in alive if other.ends[axis] > box.offsets[axis]]
        for other in alive:
            if box.intersect(other) is not None:
                raise LayoutError(f"{fqn}: chunks {other} and {box} overlap")
        alive.append(box)
