"""One layout from what each rank knows of its own part: for tensors that no rank can describe alone."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from stepkeeper_planners.errors import LayoutError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, TensorLayout

__all__ = ["join_layouts", "select_part"]


def select_part(layout: TensorLayout, ranks: Collection[int]) -> TensorLayout:
    """What these ranks hold, and no word of the others."""
    among = frozenset(ranks)
    chunks = []
    # Chunks that all are of these ranks are kept as they are: many tensors share them.
    if all(owner.rank in among for chunk in layout.chunks for owner in chunk.owners):
        return replace(layout, complete=False)
    for chunk in layout.chunks:
        own = tuple(owner for owner in chunk.owners if owner.rank in among)
        if own:
            chunks.append(Chunk(box=chunk.box, owners=own))
    return replace(layout, chunks=tuple(chunks), complete=False)


def join_layouts(parts: Mapping[int, TensorLayout]) -> TensorLayout:
    """The whole tensor, from the parts that ranks have. Equal boxes are copies of one another.

    `parts` is by rank, or by the first of several ranks that have a part together; at least one. Whether the chunks
    cover the tensor is for `check_cover` to say.

    Raises:
        LayoutError: the ranks don't speak of one tensor; it names it, the ranks, and what differs.
    """
    ranks = sorted(parts)
    first = parts[ranks[0]]
    owners: dict[Box, list[Owner]] = {}
    for rank in ranks:
        part = parts[rank]
        for attribute in ("dtype", "global_shape"):
            expected, found = getattr(first, attribute), getattr(part, attribute)
            if found != expected:
                raise LayoutError(
                    f"{first.fqn}: its {attribute} is {expected} on rank {ranks[0]}, {found} on rank {rank}"
                )
        for chunk in part.chunks:
            owners.setdefault(chunk.box, []).extend(chunk.owners)
    chunks = tuple(Chunk(box=box, owners=tuple(sorted(owners[box]))) for box in sorted(owners))
    return replace(first, chunks=chunks, complete=True)
