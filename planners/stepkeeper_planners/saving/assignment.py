"""Assign each element to exactly one of the ranks that hold it, evenly. All ranks compute the same assignment.

Evenly means: the rank that writes most writes at most 2 % and a few grains more than the least possible. That is the
total divided by the number of ranks, or more where some ranks alone hold more than their part. A grain is the largest
chunk of several holders that is too small to cut, or the smallest piece of a chunk that is cut. This holds where the
sets of holders are nested or disjoint.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple

from stepkeeper_planners.dtypes import itemsize_bytes
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.cover import check_layout
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout, one_copy_per_rank
from stepkeeper_planners.geometry.mesh_slices import keep_one_slice
from stepkeeper_planners.saving.cutting import level_shares
from stepkeeper_planners.saving.distribution import (
    Piece,
    WriteTask,
    assign_values,
    cut_to_shares,
    list_write_tasks,
    place_whole_chunks,
    sum_loads,
)

__all__ = [
    "ASSIGNMENT_VERSION",
    "LARGE_VALUE_BYTES",
    "Assignment",
    "RankShare",
    "TensorWrite",
    "assign",
    "plan_save",
]

ASSIGNMENT_VERSION: Final = 4
"""The version of the division and its numbers. Raise it with every change that divides the same state otherwise."""

_MIN_SLICE_BYTES: Final = 65_536
"""The size of the smallest piece that is cut off a chunk: every piece costs a frame to write and a request to read."""

LARGE_VALUE_BYTES: Final = 4_096
"""The size from which a value counts as load. The first rank writes all smaller values."""

_PARTS_OF_A_SHARE: Final = 64
"""No piece is smaller than a rank's even share divided by this: that is even enough."""

_EVEN_ENOUGH: Final = 50
"""Loads count as even if `_unevenness` is at most `heaviest` divided by this. Chunks stay whole if that is so."""


class TensorWrite(NamedTuple):
    """A box of a tensor that one rank writes, and the local shard that holds it.

    Like other values that a plan makes for each of many thousand tensors, this is a NamedTuple: a frozen dataclass
    takes three times as long to make.
    """

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    local_index: int
    shard_box: Box
    """The same box, with offsets relative to the shard."""

    @property
    def size_bytes(self) -> int:
        """The size of the elements, without framing."""
        return self.box.volume * itemsize_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """All tensor boxes and values that one rank writes."""

    tensors: tuple[TensorWrite, ...]
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The rank that writes each piece of each tensor, and each value."""

    by_rank: tuple[tuple[Piece, ...], ...]
    value_writers: Mapping[str, int]

    @classmethod
    def from_pieces(
        cls, pieces: Iterable[Piece], world_size: int, value_writers: Mapping[str, int]
    ) -> "Assignment":
        """Sort the pieces by rank."""
        by_rank: list[list[Piece]] = [[] for _ in range(world_size)]
        for piece in pieces:
            by_rank[piece.rank].append(piece)
        return cls(by_rank=tuple(map(tuple, by_rank)), value_writers=value_writers)

    def list_writes(self, rank: int) -> tuple[TensorWrite, ...]:
        """Return this rank's writes, sorted by name and position."""
        writes = map(_make_write, self.by_rank[rank])
        return tuple(sorted(writes, key=lambda write: (write.fqn, write.box)))

    def list_boxes(self) -> dict[str, list[Box]]:
        """Return the boxes of each tensor that any rank writes, sorted by position."""
        boxes: dict[str, list[Box]] = {}
        for piece in chain.from_iterable(self.by_rank):
            boxes.setdefault(piece.task.layout.fqn, []).append(piece.box)
        for those in boxes.values():
            those.sort()
        return boxes


def plan_save(layouts: Sequence[TensorLayout], value_bytes: Mapping[str, int], ranks: Ranks) -> RankShare:
    """Plan this rank's share of a save: over all ranks each element and each value is written once.

    Args:
        layouts: the layouts of all tensors, complete.
        value_bytes: the name and approximate size of each value; every rank holds all of them.
        ranks: this rank and the world size.

    Raises:
        LayoutError: chunks overlap or leave a gap, or no rank of the world holds one.

    Ranks: every rank must pass the same layouts, values and sizes; then no two plans write the same element.
    """
    alone = one_copy_per_rank(1)
    if ranks.world_size == 1 and all(
        len(layout.chunks) == 1 and layout.chunks[0].owners == alone for layout in layouts
    ):
        # There is nothing to divide. A single process may have tens of thousands of tensors, of few shapes.
        for layout in {(id(layout.chunks), layout.global_shape): layout for layout in layouts}.values():
            check_layout(layout)
        tensors = tuple(map(_write_whole, sorted(layouts, key=attrgetter("fqn"))))
        return RankShare(tensors=tensors, values=tuple(sorted(value_bytes)))
    assignment = assign(layouts, ranks.world_size, value_bytes=value_bytes)
    writers = assignment.value_writers
    return RankShare(
        tensors=assignment.list_writes(ranks.rank),
        values=tuple(sorted(name for name, rank in writers.items() if rank == ranks.rank)),
    )


def assign(
    layouts: Sequence[TensorLayout],
    world_size: int,
    *,
    value_bytes: Mapping[str, int] | None = None,
    min_slice_bytes: int = _MIN_SLICE_BYTES,
) -> Assignment:
    """Assign every element of every tensor, and every value, to one rank.

    Chunks that several ranks hold are cut where an even division needs it. There are at most as many cuts as the sum of
    the sizes of the holder sets; mostly there are none. Values are never cut.

    Args:
        layouts: the layouts of all tensors, complete.
        world_size: the number of ranks.
        value_bytes: the name and approximate size of each value; every rank holds all of them.
        min_slice_bytes: the size of the smallest piece to cut off a chunk.

    Raises:
        LayoutError: chunks overlap or leave a gap, or no rank of the world holds one.
    """
    for layout in layouts:
        check_layout(layout)
    # The order of a state's dicts may differ between ranks; the assignment must not.
    ordered = sorted(keep_one_slice(layouts), key=lambda layout: layout.fqn)
    tasks, holders = list_write_tasks(ordered, world_size)
    tensor_loads = [0] * world_size
    for task in tasks:
        if len(holders[task.group]) == 1:
            tensor_loads[holders[task.group][0]] += task.size_bytes
    writers = dict.fromkeys(value_bytes or {}, 0)
    value_loads = [0] * world_size
    large = {name: size for name, size in (value_bytes or {}).items() if size >= LARGE_VALUE_BYTES}
    if large:
        # Where large values go depends on what each rank would write without cuts.
        whole = place_whole_chunks(tasks, holders, tensor_loads)
        writers |= assign_values(large, sum_loads(whole, value_loads))
        for name, size in large.items():
            value_loads[writers[name]] += size
    fixed = [tensors + values for tensors, values in zip(tensor_loads, value_loads, strict=True)]
    pieces = _divide(tasks, holders, fixed, value_loads, min_slice_bytes)
    return Assignment.from_pieces(pieces, world_size, writers)


def _divide(
    tasks: Sequence[WriteTask],
    holders: Sequence[tuple[int, ...]],
    fixed: Sequence[int],
    value_loads: Sequence[int],
    min_slice_bytes: int,
) -> Sequence[Piece]:
    """Assign whole chunks where that is even enough; else cut some, if that is more even.

    Args:
        tasks: the chunks, the largest first.
        holders: the ranks of each group of tasks.
        fixed: by rank, the bytes of chunks that only it holds, and of its values.
        value_loads: by rank, the bytes of its values.
        min_slice_bytes: the size of the smallest piece to cut off a chunk.
    """
    whole = tuple(place_whole_chunks(tasks, holders, fixed))
    loads = sum_loads(whole, value_loads)
    even = -(-sum(loads) // len(loads))  # rounded up
    if _is_even(loads, even, even):
        return whole
    shared = [group for group, ranks in enumerate(holders) if len(ranks) > 1]
    sizes = Counter[int]()
    for task in tasks:
        sizes[task.group] += task.size_bytes
    shares, heaviest = level_shares([(holders[i], sizes[i]) for i in shared], fixed)
    if _is_even(loads, heaviest, even):
        return whole
    grain_bytes = max(min_slice_bytes, even // _PARTS_OF_A_SHARE)
    cut = tuple(cut_to_shares(tasks, dict(zip(shared, shares, strict=True)), holders, grain_bytes))
    # Cutting can also make it less even, since pieces have a minimum size.
    return min(whole, cut, key=lambda pieces: _unevenness(sum_loads(pieces, value_loads), heaviest, even))


def _write_whole(layout: TensorLayout) -> TensorWrite:
    box = layout.chunks[0].box
    return TensorWrite(layout.fqn, layout.dtype, layout.global_shape, box, 0, box)


def _make_write(piece: Piece) -> TensorWrite:
    layout, chunk = piece.task.layout, piece.task.chunk
    return TensorWrite(
        fqn=layout.fqn,
        dtype=layout.dtype,
        global_shape=layout.global_shape,
        box=piece.box,
        local_index=min(owner.local_index for owner in chunk.owners if owner.rank == piece.rank),
        shard_box=Box.whole(piece.box.sizes)
        if piece.box is chunk.box
        else piece.box.relative_to(chunk.box.offsets),
    )


def _unevenness(loads: Sequence[int], heaviest: int, even: int) -> int:
    """Return the largest distance in bytes of a load above `heaviest`.

    Where the even load is at least `heaviest`, a load below the even one counts too: the larger distance is returned.
    """
    over = max(loads) - heaviest
    return max(over, even - min(loads)) if heaviest <= even else over


def _is_even(loads: Sequence[int], heaviest: int, even: int) -> bool:
    return _unevenness(loads, heaviest, even) * _EVEN_ENOUGH <= heaviest
