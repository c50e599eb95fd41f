"""Choose the slice of a device mesh that writes a tensor, for tensors that lie on several slices. Pure.

The slices promise to hold copies. Nothing compares them, so parts of different slices are never mixed.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

from stepkeeper_planners.dtypes import itemsize_bytes
from stepkeeper_planners.geometry.layout import Chunk, Owner, TensorLayout

__all__ = ["keep_one_slice", "list_mesh_slices"]

Slice = tuple[int, ...]


@lru_cache(maxsize=256)
def list_mesh_slices(
    ranks: tuple[int, ...], n_slices: int, members: tuple[int, ...] | None
) -> tuple[Slice, ...]:
    """Return the ranks of each mesh slice, sorted; an empty tuple if there is only one slice.

    Args:
        ranks: the ranks of a mesh whose last dimension goes over the slices, in row-major order.
        n_slices: the length of that dimension.
        members: if not None, only these global ranks are kept; each becomes its index in this tuple.
    """
    if n_slices == 1:
        return ()
    numbers = {rank: rank for rank in ranks} if members is None else {m: i for i, m in enumerate(members)}
    slices = (ranks[place::n_slices] for place in range(n_slices))
    return tuple(sorted(tuple(sorted(numbers[r] for r in each if r in numbers)) for each in slices))


def keep_one_slice(layouts: Sequence[TensorLayout]) -> list[TensorLayout]:
    """Reduce each layout that lies on several mesh slices to the copies on one of them.

    The slices take turns by bytes, so that each writes about as much. If no slice holds all of a tensor, its
    layout is unchanged. Nothing compares the slices, and experts with the same name on all slices are not
    equal. So parts of several slices would make a tensor that no rank ever had.
    """
    if not any(layout.mesh_slices for layout in layouts):
        return list(layouts)
    turns = Counter[Slice]()
    whole: dict[tuple[int, ...], list[Slice]] = {}
    narrowed: dict[tuple[int, Slice], tuple[Owner, ...]] = {}
    chosen: list[TensorLayout] = []
    for layout in sorted(layouts, key=lambda layout: (-_size_bytes(layout), layout.fqn)):
        # There are few kinds of layouts, and the tuples of their owners are shared.
        kind = (
            (id(layout.mesh_slices), *(id(chunk.owners) for chunk in layout.chunks))
            if layout.mesh_slices
            else ()
        )
        if kind and kind not in whole:
            whole[kind] = _list_complete_slices(layout)
        slices = whole.get(kind)
        if not slices:
            chosen.append(layout)
            continue
        ranks = min(slices, key=lambda each: (turns[each], each))
        turns[ranks] += _size_bytes(layout)
        among = frozenset(ranks)
        chunks = []
        for chunk in layout.chunks:
            key = (id(chunk.owners), ranks)
            if key not in narrowed:
                narrowed[key] = tuple(owner for owner in chunk.owners if owner.rank in among)
            chunks.append(Chunk(box=chunk.box, owners=narrowed[key]))
        chosen.append(replace(layout, chunks=tuple(chunks)))
    return chosen


def _list_complete_slices(layout: TensorLayout) -> list[Slice]:
    holders = [frozenset(owner.rank for owner in chunk.owners) for chunk in layout.chunks]
    return [ranks for ranks in layout.mesh_slices if not any(each.isdisjoint(ranks) for each in holders)]


def _size_bytes(layout: TensorLayout) -> int:
    return prod(layout.global_shape) * itemsize_bytes(layout.dtype)
