"""How a tensor lies over ranks: which boxes, and who holds a copy of each. Pure; every rank computes the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from stepkeeper_planners.errors import LayoutError
from stepkeeper_planners.geometry.boxes import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Who am I among how many processes that save and load together."""

    rank: int
    world_size: int
    members: tuple[int, ...] | None = None
    """The numbers that these processes have in the default process group, by rank; None where those are their ranks."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise LayoutError(f"rank {self.rank} is not one of {self.world_size} ranks")


def ranks_in_group(rank: int, members: Sequence[int]) -> Ranks:
    """One of these processes, which are given by their numbers in the default process group, by rank."""
    numbered = tuple(members) == tuple(range(len(members)))
    return Ranks(rank=rank, world_size=len(members), members=None if numbered else tuple(members))


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Owner:
    """A copy of a chunk: the rank that holds it, and which of that rank's local shards it is."""

    rank: int
    local_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A part of a tensor with all its copies, at least one."""

    box: Box
    owners: tuple[Owner, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """A whole tensor: its chunks are disjoint and cover it, unless it is said not to be complete."""

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    complete: bool = True
    """False: only this rank's chunks are here, nobody knows the others'. `join.join_layouts` makes one of them."""
    mesh_slices: tuple[tuple[int, ...], ...] = ()
    """The ranks of each slice of a mesh on which the tensor lies by itself, if there are several."""

    def local_boxes(self, rank: int) -> dict[int, Box]:
        """What this rank holds: the lowest local index of each distinct box that it has a copy of.

        Further copies on the same rank are left out: they are never read or written separately.
        """
        boxes: dict[int, Box] = {}
        for chunk in self.chunks:
            local = [owner.local_index for owner in chunk.owners if owner.rank == rank]
            if local:
                boxes[min(local)] = chunk.box
        return boxes


@lru_cache(maxsize=8)
def one_copy_per_rank(world_size: int) -> tuple[Owner, ...]:
    """The owners of what every rank holds whole. One shared tuple: there may be many such tensors and ranks."""
    return tuple(Owner(rank=rank, local_index=0) for rank in range(world_size))


def whole_tensor(fqn: str, dtype: str, shape: Sequence[int], ranks: Ranks) -> TensorLayout:
    """The layout of a tensor that every rank holds whole."""
    chunks = _whole(tuple(shape), ranks.world_size)
    return TensorLayout(fqn=fqn, dtype=dtype, global_shape=chunks[0].box.sizes, chunks=chunks)


@lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...], world_size: int) -> tuple[Chunk, ...]:
    return (Chunk(box=Box.whole(shape), owners=one_copy_per_rank(world_size)),)
