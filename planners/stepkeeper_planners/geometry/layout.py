"""Describe how a tensor is laid out over ranks: its chunks, and the ranks that hold a copy of each. Pure.

Every rank computes the same layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from stepkeeper_planners.errors import LayoutError
from stepkeeper_planners.geometry.boxes import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's rank, and the number of ranks that save and load together."""

    rank: int
    world_size: int
    members: tuple[int, ...] | None = None
    """The global ranks of these processes, by rank; None if they are numbered as in the default process group."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise LayoutError(f"rank {self.rank} is not one of {self.world_size} ranks")


def ranks_in_group(rank: int, members: Sequence[int]) -> Ranks:
    """Return the `Ranks` of the process with this rank in a group whose members have these global ranks."""
    numbered = tuple(members) == tuple(range(len(members)))
    return Ranks(rank=rank, world_size=len(members), members=None if numbered else tuple(members))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Owner:
    """A copy of a chunk: the rank that holds it, and its index among that rank's local shards."""

    rank: int
    local_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of a tensor with all its copies, at least one."""

    box: Box
    owners: tuple[Owner, ...]


class TensorLayout(NamedTuple):
    """The layout of a whole tensor. Its chunks are disjoint and cover it, unless `complete` is False.

    A NamedTuple, since a plan makes many thousands of them: a frozen dataclass takes three times as long.
    """

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    complete: bool = True
    """False if only this rank's chunks are here, as no rank knows the others'. A save joins those of all ranks."""
    mesh_slices: tuple[tuple[int, ...], ...] = ()
    """The ranks of each slice of the device mesh, if there are several slices that hold the whole tensor each."""

    def local_boxes(self, rank: int) -> dict[int, Box]:
        """Return a rank's boxes: each distinct one, by the lowest local index of its copies on that rank."""
        boxes: dict[int, Box] = {}
        for chunk in self.chunks:
            local = [owner.local_index for owner in chunk.owners if owner.rank == rank]
            if local:
                boxes[min(local)] = chunk.box
        return boxes


@lru_cache(maxsize=8)
def one_copy_per_rank(world_size: int) -> tuple[Owner, ...]:
    """Return the owners of a chunk that every rank holds. All tensors share the tuple, which may be long."""
    return tuple(Owner(rank=rank, local_index=0) for rank in range(world_size))


def whole_tensor(fqn: str, dtype: str, shape: Sequence[int], ranks: Ranks) -> TensorLayout:
    """Return the layout of a tensor that every rank holds whole."""
    chunks = _whole(tuple(shape), ranks.world_size)
    return TensorLayout(fqn=fqn, dtype=dtype, global_shape=chunks[0].box.sizes, chunks=chunks)


@lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...], world_size: int) -> tuple[Chunk, ...]:
    return (Chunk(box=Box.whole(shape), owners=one_copy_per_rank(world_size)),)
