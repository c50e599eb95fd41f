"""Divide chunks and values among the ranks that hold them: whole ones to the least loaded, large ones cut.

A group is a set of ranks that hold the same chunks, the holders. It has a number.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stepkeeper_planners.dtypes import itemsize_bytes
from stepkeeper_planners.errors import LayoutError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, TensorLayout
from stepkeeper_planners.saving.cutting import Cutter, cut_by_shares

__all__ = [
    "Piece",
    "WriteTask",
    "assign_values",
    "cut_to_shares",
    "list_write_tasks",
    "place_whole_chunks",
    "sum_loads",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTask:
    """A chunk that one of its holders must write."""

    layout: TensorLayout
    chunk: Chunk
    group: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A chunk or a part of one, with the rank that writes it."""

    task: WriteTask
    box: Box
    rank: int
    size_bytes: int


def list_write_tasks(
    layouts: Sequence[TensorLayout], world_size: int
) -> tuple[list[WriteTask], list[tuple[int, ...]]]:
    """List the chunks to write, the largest first, and the sorted ranks of each group's number.

    An empty chunk is listed only for a tensor that has no other.
    """
    # Layouts share tuples of owners, which are long: looking them up by identity is much faster.
    by_owners: dict[int, int] = {}
    by_holders: dict[tuple[int, ...], int] = {}
    tasks: list[WriteTask] = []
    for layout in layouts:
        element_bytes = itemsize_bytes(layout.dtype)
        chunks = [chunk for chunk in layout.chunks if chunk.box.volume]
        for chunk in chunks or layout.chunks[:1]:
            group = by_owners.get(id(chunk.owners))
            if group is None:
                ranks = tuple(sorted({owner.rank for owner in chunk.owners}))
                if not ranks or ranks[-1] >= world_size:
                    raise LayoutError(
                        f"{layout.fqn}: chunk {chunk.box} is held by ranks {ranks} of {world_size}"
                    )
                group = by_owners[id(chunk.owners)] = by_holders.setdefault(ranks, len(by_holders))
            size_bytes = chunk.box.volume * element_bytes
            tasks.append(WriteTask(layout=layout, chunk=chunk, group=group, size_bytes=size_bytes))
    tasks.sort(key=lambda task: (-task.size_bytes, task.layout.fqn, task.chunk.box))
    return tasks, list(by_holders)


def place_whole_chunks(
    tasks: Sequence[WriteTask], holders: Sequence[tuple[int, ...]], fixed: Sequence[int]
) -> Iterator[Piece]:
    """Assign each chunk whole to its least loaded holder, the largest first. `fixed` is each rank's load before."""
    loads = list(fixed)
    # Loads only grow, so an outdated heap entry is too small. It is corrected when it comes to the top.
    heaps: dict[int, list[tuple[int, int]]] = {}
    for task in tasks:
        ranks = holders[task.group]
        if len(ranks) == 1:
            yield _make_whole_piece(task, ranks[0])
            continue
        heap = heaps.get(task.group)
        if heap is None:
            heap = heaps[task.group] = [(loads[rank], rank) for rank in ranks]
            heapq.heapify(heap)
        while heap[0][0] != loads[heap[0][1]]:
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        load, rank = heap[0]
        # Empty chunks weigh a byte, or all of them would land on one rank.
        loads[rank] = load + max(1, task.size_bytes)
        yield _make_whole_piece(task, rank)


def cut_to_shares(
    tasks: Sequence[WriteTask],
    shares: Mapping[int, Mapping[int, int]],
    holders: Sequence[tuple[int, ...]],
    grain_bytes: int,
) -> Iterator[Piece]:
    """Divide each group's chunks by its holders' `shares` in bytes, as exactly as pieces of `grain_bytes` allow.

    If a holder writes more than its share of one group, its share of the next is reduced. A group without shares has
    one holder.
    """
    by_group: dict[int, list[WriteTask]] = {}
    for task in tasks:
        by_group.setdefault(task.group, []).append(task)
    # By rank, the bytes that it writes beyond its shares of the groups so far.
    ahead = dict.fromkeys((rank for ranks in holders for rank in ranks), 0)
    for group in sorted(by_group, key=lambda g: (len(holders[g]), holders[g])):
        if group not in shares:
            yield from (_make_whole_piece(task, holders[group][0]) for task in by_group[group])
            continue
        left = {rank: shares[group].get(rank, 0) - ahead[rank] for rank in holders[group]}
        for piece in _cut_group(by_group[group], left, grain_bytes):
            left[piece.rank] -= piece.size_bytes
            yield piece
        ahead.update((rank, -rest) for rank, rest in left.items())


def _cut_group(tasks: Sequence[WriteTask], shares: Mapping[int, int], grain_bytes: int) -> Iterator[Piece]:
    """Assign small chunks whole to the holder with the most left to write; then cut the large ones by what is left."""
    # The rank with the most left to write is at the top.
    heap = [(-share, rank) for rank, share in sorted(shares.items())]
    heapq.heapify(heap)
    large: list[tuple[WriteTask, Cutter]] = []
    for task in tasks:
        sizes = task.chunk.box.sizes
        cutter = Cutter.for_box(sizes, itemsize_bytes(task.layout.dtype), grain_bytes)
        if cutter is None:
            share, rank = heap[0]
            heapq.heapreplace(heap, (share + max(1, task.size_bytes), rank))
            yield _make_whole_piece(task, rank)
        else:
            large.append((task, cutter))
    left = sorted((rank, max(0, -share)) for share, rank in heap)
    boxes = [(task.chunk.box, cutter) for task, cutter in large]
    for index, box, rank in cut_by_shares(boxes, left):
        task = large[index][0]
        size_bytes = box.volume * itemsize_bytes(task.layout.dtype)
        yield Piece(task=task, box=box, rank=rank, size_bytes=size_bytes)


def _make_whole_piece(task: WriteTask, rank: int) -> Piece:
    return Piece(task=task, box=task.chunk.box, rank=rank, size_bytes=task.size_bytes)


def sum_loads(pieces: Iterable[Piece], values: Sequence[int]) -> list[int]:
    """Sum the bytes that each rank writes: its pieces, on top of its `values`."""
    loads = list(values)
    for piece in pieces:
        loads[piece.rank] += piece.size_bytes
    return loads


def assign_values(value_bytes: Mapping[str, int], loads: Sequence[int]) -> dict[str, int]:
    """Assign each value, the largest first, to the rank with the least load. `loads` are those of uncut tensors."""
    writers: dict[str, int] = {}
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for name in sorted(value_bytes, key=lambda name: (-value_bytes[name], name)):
        load, rank = heap[0]
        writers[name] = rank
        heapq.heapreplace(heap, (load + value_bytes[name], rank))
    return writers
