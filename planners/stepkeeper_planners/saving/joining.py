"""Join the parts of a layout that ranks know, for tensors that no rank can describe alone."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from stepkeeper_planners.errors import LayoutError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, TensorLayout

__all__ = ["join_layouts", "select_part"]


def select_part(layout: TensorLayout, ranks: Collection[int]) -> TensorLayout:
    """Return the layout with only the chunks and owners of these ranks, as an incomplete one."""
    among = frozenset(ranks)
    chunks = []
    # The tuple of chunks is kept if it is of these ranks only: many tensors share it.
    if all(owner.rank in among for chunk in layout.chunks for owner in chunk.owners):
        return replace(layout, complete=False)
    for chunk in layout.chunks:
        own = tuple(owner for owner in chunk.owners if owner.rank in among)
        if own:
            chunks.append(Chunk(box=chunk.box, owners=own))
    return replace(layout, chunks=tuple(chunks), complete=False)


def join_layouts(parts: Mapping[int, TensorLayout]) -> TensorLayout:
    """Join the parts of one tensor's layout. Equal boxes on different ranks are copies of one chunk.

    The result is not checked for gaps and overlaps: `check_cover` does that.

    Args:
        parts: at least one part, by rank, or by the first of several ranks that hold a part together.

    Raises:
        LayoutError: the parts differ in dtype or shape; the message names the tensor, the ranks, and what differs.
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
