"""Who writes what: each element exactly once, bytes spread over those that hold them. All ranks compute the same.

Even means: no rank writes more than the least that the heaviest must write (the total divided by the ranks, unless some
ranks alone hold more than their part), up to 2 % and a few grains. A grain is the largest chunk of several holders that
isn't cut because it is small, or the smallest piece that one is cut into. This holds where the sets of holders are
nested or disjoint; `balance` says what holds of others.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from stepkeeper_planners.dtypes import itemsize_bytes
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.cover import check_layout
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.geometry.mesh_slices import keep_one_slice
from stepkeeper_planners.saving.balance import Group, level_shares
from stepkeeper_planners.saving.distribution import (
    Piece,
    assign_values,
    cut_to_shares,
    list_write_tasks,
    place_whole_chunks,
    sum_loads,
)

__all__ = [
    "ASSIGNMENT_VERSION",
    "BALANCE",
    "LARGE_VALUE_BYTES",
    "MIN_SLICE_BYTES",
    "Assignment",
    "SavePlan",
    "TensorWrite",
    "assign",
    "plan_save",
]

ASSIGNMENT_VERSION: Final = 2
"""Raised with every change after which the same state is divided otherwise: ranks must not differ in that."""

MIN_SLICE_BYTES: Final = 65_536
"""Nothing smaller is cut off a chunk: every piece costs a frame when written and a request when read."""

LARGE_VALUE_BYTES: Final = 4_096
"""Smaller values weigh nothing, and are the first rank's."""

_PARTS_OF_A_SHARE: Final = 64
"""Nor anything smaller than this part of what a rank writes: that is even enough."""

_EVEN_ENOUGH: Final = 50
"""Whole chunks are left whole where that makes no rank differ by more than this part of what it should write."""

BALANCE: Final = {
    "slices from": MIN_SLICE_BYTES,
    "large values from": LARGE_VALUE_BYTES,
    "parts of a share": _PARTS_OF_A_SHARE,
    "even enough": _EVEN_ENOUGH,
}
"""All numbers by which bytes are divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorWrite:
    """This rank writes this box of the tensor, from this local shard or a part of it."""

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    local_index: int
    shard_box: Box
    """The same box, counted from the shard's own first element."""

    @property
    def size_bytes(self) -> int:
        """The bytes of the elements, without any framing."""
        return self.box.volume * itemsize_bytes(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """All that one rank writes."""

    tensors: tuple[TensorWrite, ...]
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """All pieces of all tensors, each with the rank that writes it."""

    by_rank: tuple[tuple[Piece, ...], ...]
    value_writers: Mapping[str, int]

    @classmethod
    def from_pieces(
        cls, pieces: Iterable[Piece], world_size: int, value_writers: Mapping[str, int]
    ) -> "Assignment":
        """The pieces, by rank."""
        by_rank: list[list[Piece]] = [[] for _ in range(world_size)]
        for piece in pieces:
            by_rank[piece.rank].append(piece)
        return cls(by_rank=tuple(map(tuple, by_rank)), value_writers=value_writers)

    def list_writes(self, rank: int) -> tuple[TensorWrite, ...]:
        """What this rank writes, sorted by name and place."""
        writes = map(_make_write, self.by_rank[rank])
        return tuple(sorted(writes, key=lambda write: (write.fqn, write.box)))

    def list_boxes(self) -> dict[str, list[Box]]:
        """What is written of each tensor by anyone, in order of place."""
        boxes: dict[str, list[Box]] = {}
        for piece in chain.from_iterable(self.by_rank):
            boxes.setdefault(piece.task.layout.fqn, []).append(piece.box)
        for those in boxes.values():
            those.sort()
        return boxes


def plan_save(layouts: Sequence[TensorLayout], value_bytes: Mapping[str, int], ranks: Ranks) -> SavePlan:
    """Over all ranks each element is written once, and each value; this is my share.

    Ranks: every rank must give the same layouts, values and sizes; then no two plans write the same element.

    Raises:
        LayoutError: chunks overlap or leave a gap, or one is held by no rank.
    """
    assignment = assign(layouts, ranks.world_size, value_bytes=value_bytes)
    writers = assignment.value_writers
    return SavePlan(
        tensors=assignment.list_writes(ranks.rank),
        values=tuple(sorted(name for name, rank in writers.items() if rank == ranks.rank)),
    )


def assign(
    layouts: Sequence[TensorLayout],
    world_size: int,
    *,
    value_bytes: Mapping[str, int] | None = None,
    min_slice_bytes: int = MIN_SLICE_BYTES,
) -> Assignment:
    """Every element of every tensor is one rank's to write. Chunks of several holders are cut where that is needed.

    So is each value, which every rank has and nobody cuts; `value_bytes` are their sizes, about.

    At most as many cuts are made as there are different sets of holders, times their members; mostly none.

    Raises:
        LayoutError: as `plan_save`.
    """
    for layout in layouts:
        check_layout(layout)
    # Ranks may have the same state in dicts of another order, and must find the same.
    ordered = sorted(keep_one_slice(layouts), key=lambda layout: layout.fqn)
    tasks, holders = list_write_tasks(ordered, world_size)
    fixed = [0] * world_size
    for task in tasks:
        if len(holders[task.group]) == 1:
            fixed[holders[task.group][0]] += task.size_bytes
    large = {name: size for name, size in (value_bytes or {}).items() if size >= LARGE_VALUE_BYTES}
    writers = dict.fromkeys(value_bytes or {}, 0)
    values = [0] * world_size
    if large:
        writers |= assign_values(large, sum_loads(place_whole_chunks(tasks, holders, fixed), values))
        for name, size in large.items():
            values[writers[name]] += size
    fixed = [of_tensors + of_values for of_tensors, of_values in zip(fixed, values, strict=True)]
    whole = tuple(place_whole_chunks(tasks, holders, fixed))
    loads = sum_loads(whole, values)
    even = -(-sum(loads) // world_size)
    if _is_even(loads, even, even):
        return Assignment.from_pieces(whole, world_size, writers)
    shared = [group for group, ranks in enumerate(holders) if len(ranks) > 1]
    sizes = Counter[int]()
    for task in tasks:
        sizes[task.group] += task.size_bytes
    level = level_shares([Group(holders=holders[i], size_bytes=sizes[i]) for i in shared], fixed)
    heaviest = level.heaviest_bytes
    if _is_even(loads, heaviest, even):
        return Assignment.from_pieces(whole, world_size, writers)
    grain_bytes = max(min_slice_bytes, even // _PARTS_OF_A_SHARE)
    cut = tuple(cut_to_shares(tasks, dict(zip(shared, level.by_group, strict=True)), holders, grain_bytes))
    best = min(whole, cut, key=lambda pieces: _unevenness(sum_loads(pieces, values), heaviest, even))
    return Assignment.from_pieces(best, world_size, writers)


def _make_write(piece: Piece) -> TensorWrite:
    layout, chunk = piece.task.layout, piece.task.chunk
    return TensorWrite(
        fqn=layout.fqn,
        dtype=layout.dtype,
        global_shape=layout.global_shape,
        box=piece.box,
        local_index=min(owner.local_index for owner in chunk.owners if owner.rank == piece.rank),
        shard_box=piece.box.relative_to(chunk.box.offsets),
    )


def _unevenness(loads: Sequence[int], heaviest: int, even: int) -> int:
    """How far a load is from what it should be: below `heaviest`, and where that is even, not below it either."""
    over = max(loads) - heaviest
    return max(over, even - min(loads)) if heaviest <= even else over


def _is_even(loads: Sequence[int], heaviest: int, even: int) -> bool:
    return _unevenness(loads, heaviest, even) * _EVEN_ENOUGH <= heaviest
