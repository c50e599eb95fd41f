"""Who writes what: each chunk exactly once, bytes spread over its holders. All ranks compute the same."""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from stepkeeper_planners.boxes import Box
from stepkeeper_planners.dtypes import itemsize_bytes
from stepkeeper_planners.errors import LayoutError
from stepkeeper_planners.layout import Chunk, Ranks, TensorLayout, check_cover


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorWrite:
    """This rank writes this box of the tensor, from this local shard, which is exactly that box."""

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box
    local_index: int

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
class _Work:
    layout: TensorLayout
    chunk: Chunk
    holders: tuple[int, ...]
    size_bytes: int


def plan_save(layouts: Sequence[TensorLayout], value_keys: Sequence[str], ranks: Ranks) -> SavePlan:
    """Over all ranks each chunk is written once; this is my share. Values are rank 0's.

    Ranks: every rank must give the same layouts and keys; then no two plans write the same chunk.

    Raises:
        LayoutError: chunks overlap or leave a gap, or one is held by no rank.
    """
    for layout in layouts:
        check_cover(layout.fqn, layout.global_shape, [chunk.box for chunk in layout.chunks])
    mine = [
        TensorWrite(
            fqn=work.layout.fqn,
            dtype=work.layout.dtype,
            global_shape=work.layout.global_shape,
            box=work.chunk.box,
            local_index=min(o.local_index for o in work.chunk.owners if o.rank == ranks.rank),
        )
        for work, writer in _assign(_all_work(layouts, ranks))
        if writer == ranks.rank
    ]
    mine.sort(key=lambda write: (write.fqn, write.box))
    return SavePlan(tensors=tuple(mine), values=tuple(sorted(value_keys)) if ranks.rank == 0 else ())


def _all_work(layouts: Iterable[TensorLayout], ranks: Ranks) -> Iterator[_Work]:
    # Holders are many and mostly the same tuple: looked up by identity of the owners, which layouts share.
    known: dict[int, tuple[int, ...]] = {}
    for layout in layouts:
        element_bytes = itemsize_bytes(layout.dtype)
        for chunk in layout.chunks:
            holders = known.get(id(chunk.owners))
            if holders is None:
                holders = known[id(chunk.owners)] = tuple(sorted({owner.rank for owner in chunk.owners}))
            if not holders or holders[-1] >= ranks.world_size:
                raise LayoutError(
                    f"{layout.fqn}: chunk {chunk.box} is held by ranks {holders} of {ranks.world_size}"
                )
            yield _Work(
                layout=layout, chunk=chunk, holders=holders, size_bytes=chunk.box.volume * element_bytes
            )


def _assign(works: Iterable[_Work]) -> Iterator[tuple[_Work, int]]:
    """Largest first to the least loaded holder, after what has only one holder."""
    loads: dict[int, int] = {}
    shared: list[_Work] = []
    for work in works:
        if len(work.holders) > 1:
            shared.append(work)
            continue
        loads[work.holders[0]] = loads.get(work.holders[0], 0) + work.size_bytes
        yield work, work.holders[0]
    shared.sort(key=lambda w: (-w.size_bytes, w.layout.fqn, w.chunk.box))
    # Loads only grow, so a heap entry that is out of date is too small: it is corrected when it comes up.
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for work in shared:
        heap = heaps.get(work.holders)
        if heap is None:
            heap = heaps[work.holders] = [(loads.get(rank, 0), rank) for rank in work.holders]
            heapq.heapify(heap)
        while heap[0][0] != loads.get(heap[0][1], 0):
            heapq.heapreplace(heap, (loads.get(heap[0][1], 0), heap[0][1]))
        load, rank = heap[0]
        # Empty chunks weigh a byte, or all of them would land on one rank.
        loads[rank] = load + max(1, work.size_bytes)
        yield work, rank
