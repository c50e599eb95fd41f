"""Layouts of tensors."""

from itertools import pairwise, product

from hypothesis import strategies as st

from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, TensorLayout

__all__ = ["cut_anywhere", "rows"]


def rows(fqn: str, *pieces: tuple[int, int, tuple[int, ...]]) -> TensorLayout:
    """A 1-dim tensor cut into (start, size, ranks that hold it)."""
    chunks = tuple(
        Chunk(
            box=Box(offsets=(start,), sizes=(size,)),
            owners=tuple(Owner(rank=r, local_index=i) for r in ranks),
        )
        for i, (start, size, ranks) in enumerate(pieces)
    )
    return TensorLayout(fqn=fqn, dtype="float32", global_shape=(sum(s for _, s, _ in pieces),), chunks=chunks)


@st.composite
def cut_anywhere(
    draw: st.DrawFn, fqn: str, dtype: str, shape: tuple[int, ...], world_size: int, *, most_cuts: int
) -> TensorLayout:
    """Cut anywhere along each dimension; each part held by any ranks, on some of them more than once."""
    places = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=most_cuts))}) for size in shape]
    spans = [list(pairwise(points)) or [(0, 0)] for points in places]
    counts = dict.fromkeys(range(world_size), 0)
    chunks = []
    for cell in product(*spans):
        owners = []
        for rank in draw(st.lists(st.integers(0, world_size - 1), min_size=1, max_size=world_size + 1)):
            owners.append(Owner(rank=rank, local_index=counts[rank]))
            counts[rank] += 1
        box = Box(offsets=tuple(a for a, _ in cell), sizes=tuple(b - a for a, b in cell))
        chunks.append(Chunk(box=box, owners=tuple(owners)))
    return TensorLayout(fqn=fqn, dtype=dtype, global_shape=shape, chunks=tuple(chunks))
