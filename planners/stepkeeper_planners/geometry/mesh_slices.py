"""Choose the slice of a device mesh that writes a tensor, for tensors that lie on several slices. Pure.

The slices should hold copies, but nothing compares them. If they differ, as experts do that have the same name on all
slices, parts of several would make a tensor that no rank ever had. So one slice writes all of a tensor.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from math import prod

from stepkeeper_planners.dtypes import itemsize_bytes
from stepkeeper_planners.geometry.layout import Chunk, Owner, TensorLayout

__all__ = ["keep_one_slice", "list_mesh_slices"]

Slice = tuple[int, ...]
"""The ranks of one slice, sorted."""


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
    slices = ([numbers[r] for r in ranks[place::n_slices] if r in numbers] for place in range(n_slices))
    return tuple(sorted(tuple(sorted(each)) for each in slices))


def keep_one_slice(layouts: Sequence[TensorLayout]) -> list[TensorLayout]:
    """Reduce each layout that lies on several mesh slices to the copies on one of them.

    The next layout, from the largest on, goes to the slice with the fewest bytes so far, so that all write about the
    same. A layout stays unchanged if no slice holds all of it.
    """
    if not any(layout.mesh_slices for layout in layouts):
        return list(layouts)
    # Tensors share the long tuples of their owners, so the tuples' ids are short keys for what depends on the owners.
    complete: dict[tuple[int, ...], list[Slice]] = {}
    narrowed: dict[tuple[int, Slice], tuple[Owner, ...]] = {}
    written_bytes = Counter[Slice]()
    kept: list[TensorLayout] = []
    for layout in sorted(layouts, key=lambda layout: (-_size_bytes(layout), layout.fqn)):
        slices: list[Slice] = []
        if layout.mesh_slices:
            ids = (id(layout.mesh_slices), *(id(chunk.owners) for chunk in layout.chunks))
            slices = complete[ids] if ids in complete else _list_complete_slices(layout)
            complete[ids] = slices
        if not slices:
            kept.append(layout)
            continue
        ranks = min(slices, key=lambda each: (written_bytes[each], each))
        written_bytes[ranks] += _size_bytes(layout)
        among = frozenset(ranks)
        chunks = []
        for chunk in layout.chunks:
            key = (id(chunk.owners), ranks)
            if key not in narrowed:
                narrowed[key] = tuple(owner for owner in chunk.owners if owner.rank in among)
            chunks.append(Chunk(box=chunk.box, owners=narrowed[key]))
        kept.append(layout._replace(chunks=tuple(chunks)))
    return kept


def _list_complete_slices(layout: TensorLayout) -> list[Slice]:
    """Return the slices whose ranks hold a copy of every chunk."""
    holders = [frozenset(owner.rank for owner in chunk.owners) for chunk in layout.chunks]
    return [ranks for ranks in layout.mesh_slices if not any(each.isdisjoint(ranks) for each in holders)]


def _size_bytes(layout: TensorLayout) -> int:
    return prod(layout.global_shape) * itemsize_bytes(layout.dtype)
