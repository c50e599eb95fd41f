"""Compute which rank holds which part of a tensor that is sharded and replicated over a mesh. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Final

import numpy as np

from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMesh:
    """A mesh of ranks, in row-major order. The mesh need not contain this process's rank."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DimShard:
    """A mesh dimension shards this dimension of the tensor, as DTensor's Shard and _StridedShard do."""

    dim: int
    split_factor: int = 1
    """The number of parts that later mesh dimensions cut it into first, as for FSDP over tensor parallelism; or 1."""


Placements = tuple[DimShard | None, ...]
"""For each mesh dimension, the tensor dimension that it shards; None if it holds copies."""

_SHOWN: Final = 16
"""Most ranks of a mesh that a message shows."""

Span = tuple[int, int]
"""Offset and size along one dimension."""


@lru_cache(maxsize=64)
def add_slice_dimension(mesh: RankMesh, root: RankMesh) -> RankMesh:
    """Return the mesh with one more dimension, over the slices beside it in its root mesh, if there are any.

    An example is a model with some tensor-parallel layers: every other layer lies on one mesh for each of the
    parallel ranks. These meshes don't reference each other, and hold copies.
    """
    # By dimension of the root, where each rank of the mesh is.
    at = np.array(np.unravel_index([root.ranks.index(rank) for rank in mesh.ranks], root.shape))
    along = [dim for dim in range(len(root.shape)) if (at[dim] != at[dim][0]).any()]
    beside = [dim for dim in range(len(root.shape)) if dim not in along]
    lengths = tuple(root.shape[dim] for dim in along)
    n_slices = prod(root.shape[dim] for dim in beside)
    is_slice = prod(lengths) == len(mesh.ranks)
    if n_slices == 1 or not is_slice:
        return mesh
    # Row by row, the ranks that are at one place of each slice.
    rows = np.array(root.ranks).reshape(root.shape).transpose([*along, *beside]).reshape(-1, n_slices)
    places = np.ravel_multi_index(at[along], lengths) if along else np.zeros(1, dtype=np.int64)
    ranks: list[int] = rows[places].flatten().tolist()
    return RankMesh(shape=(*mesh.shape, n_slices), ranks=tuple(ranks))


@lru_cache(maxsize=256)
def chunks_on_mesh(mesh: RankMesh, placements: Placements, shape: tuple[int, ...]) -> tuple[Chunk, ...]:
    """Return the parts that have elements, each with a copy on every rank of its place on the mesh, at local index 0.

    A tensor without elements is one chunk that all ranks of the mesh hold. The result and its owners are
    shared between tensors, because there may be thousands of them on a thousand ranks. Raises
    UnsupportedShardingError if the placements don't fit the mesh or the shape, or don't determine which rank
    holds what.
    """
    if not prod(shape):
        return (Chunk(box=Box.whole(shape), owners=_owners(mesh.ranks)),)
    cuts = _cuts_by_dim(mesh, placements, len(shape))
    per_dim = [_spans(size, [mesh.shape[m] for m in cuts[dim]]) for dim, size in enumerate(shape)]
    used = tuple(m for mesh_dims in cuts for m in mesh_dims)
    groups = _groups(mesh, used)
    chunks = []
    for spans, owners in zip(product(*per_dim), groups, strict=True):
        if all(size for _, size in spans):
            box = Box(offsets=tuple(start for start, _ in spans), sizes=tuple(size for _, size in spans))
            chunks.append(Chunk(box=box, owners=owners))
    return tuple(chunks)


@lru_cache(maxsize=256)
def chunks_in_group(
    mesh: RankMesh, placements: Placements, shape: tuple[int, ...], members: tuple[int, ...]
) -> tuple[Chunk, ...]:
    """Return what `chunks_on_mesh` does, with ranks counted in a group whose `members` have these global ranks.

    Copies outside of the group are left out. Raises UnsupportedShardingError also if all copies of a part are.
    """
    rank_of = {member: rank for rank, member in enumerate(members)}
    chunks = []
    for chunk in chunks_on_mesh(mesh, placements, shape):
        holders = tuple(rank_of[owner.rank] for owner in chunk.owners if owner.rank in rank_of)
        if not holders:
            outside = ", ".join(str(owner.rank) for owner in chunk.owners[:_SHOWN])
            raise UnsupportedShardingError(
                f"its part at {chunk.box.offsets} lies on rank {outside}, which isn't in the process group of "
                f"{len(members)} ranks that saves or loads. Pass a group that holds all of the tensor's parts"
            )
        chunks.append(Chunk(box=chunk.box, owners=_owners(holders)))
    return tuple(chunks)


@lru_cache(maxsize=256)
def check_ascending_ranks(mesh: RankMesh, placements: Placements) -> None:
    """Check that ranks ascend along every mesh dimension that shards. The error suggests a better mesh.

    Otherwise torch contradicts itself: its collectives take the parts in the order of ranks, so full_tensor()
    and distribute_tensor() use another order than the mesh and the placements define.
    """
    grid = np.array(mesh.ranks).reshape(mesh.shape)
    for dim, cut in enumerate(placements):
        if cut is not None and (np.diff(grid, axis=dim) <= 0).any():
            shown = str(grid.tolist()) if grid.size <= _SHOWN else f"of shape {mesh.shape}"
            raise UnsupportedShardingError(
                f"it is sharded over dimension {dim} of the mesh {shown}, along which ranks don't ascend. There torch "
                "contradicts itself: full_tensor() takes the parts by rank, the placements by place on the mesh. "
                "Build the mesh with ranks in ascending order along it"
            )


@lru_cache(maxsize=256)
def box_of_rank(mesh: RankMesh, placements: Placements, shape: tuple[int, ...], rank: int) -> Box | None:
    """Return one rank's box; None if it has no elements. Raises as `chunks_on_mesh`."""
    chunks = chunks_on_mesh(mesh, placements, shape)
    held = (chunk.box for chunk in chunks if any(owner.rank == rank for owner in chunk.owners))
    return next(held, None)


def _cuts_by_dim(mesh: RankMesh, placements: Placements, ndim: int) -> list[list[int]]:
    """Return for each tensor dimension the mesh dimensions that shard it, the outermost cut first."""
    if len(placements) != len(mesh.shape):
        raise UnsupportedShardingError(
            f"{len(placements)} placements for a mesh of {len(mesh.shape)} dimensions"
        )
    cuts: list[list[int]] = [[] for _ in range(ndim)]
    # From the last on: a split factor counts the parts that later mesh dimensions make.
    for mesh_dim in reversed(range(len(placements))):
        cut = placements[mesh_dim]
        if cut is None:
            continue
        if not -ndim <= cut.dim < ndim:
            raise UnsupportedShardingError(f"dimension {cut.dim} of a tensor of {ndim} dimensions is cut")
        order = cuts[cut.dim]
        order.insert(_position(mesh, order, cut.split_factor), mesh_dim)
    return cuts


def _position(mesh: RankMesh, order: Sequence[int], split_factor: int) -> int:
    """Return how many of the cuts, outermost first, come before a cut with this split factor: those that make it."""
    parts = 1
    for position, mesh_dim in enumerate(order):
        if parts == split_factor:
            return position
        parts *= mesh.shape[mesh_dim]
    if parts == split_factor:
        return len(order)
    raise UnsupportedShardingError(
        f"a strided shard with split factor {split_factor}, while the mesh dimensions after it cut its dimension into "
        f"{[mesh.shape[m] for m in order]}: each rank holds several separate pieces. redistribute() it to Shard or "
        "Replicate first"
    )


def _spans(size: int, counts: Sequence[int]) -> list[Span]:
    """Cut a dimension again and again as torch.chunk does; return the parts in row-major order."""
    spans: list[Span] = [(0, size)]
    for count in counts:
        spans = [part for span in spans for part in _cut(span, count)]
    return spans


def _cut(span: Span, count: int) -> Iterator[Span]:
    start, size = span
    full = -(-size // count)
    for number in range(count):
        first = min(number * full, size)
        yield start + first, min(full, size - first)


@lru_cache(maxsize=64)
def _groups(mesh: RankMesh, used: tuple[int, ...]) -> tuple[tuple[Owner, ...], ...]:
    """Return, for each place in the used mesh dimensions, the ranks that differ only in the unused ones. Row-major."""
    grid = np.array(mesh.ranks).reshape(mesh.shape)
    unused = [m for m in range(len(mesh.shape)) if m not in used]
    rows = grid.transpose([*used, *unused]).reshape(prod(mesh.shape[m] for m in used), -1)
    return tuple(_owners(tuple(row)) for row in rows.tolist())


@lru_cache(maxsize=8192)
def _owners(ranks: tuple[int, ...]) -> tuple[Owner, ...]:
    return tuple(Owner(rank=rank, local_index=0) for rank in sorted(ranks))
