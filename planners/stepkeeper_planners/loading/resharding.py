"""Plan which parts of a tensor's stored chunks this rank reads, for any layout then and now."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from stepkeeper_planners.errors import LayoutError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.cover import check_disjoint
from stepkeeper_planners.loading.stored_state import StoredTensor

_FEW: Final = 32
"""The number of boxes up to which they are compared one by one, without arrays."""


class PieceRead(NamedTuple):
    """One read: the elements `wanted_box` (global offsets) of a stored chunk, into the local shard `local_index`."""

    fqn: str
    stored_fqn: str
    """The name in the checkpoint, which may be another name of a tied tensor."""
    stored_index: int
    stored_box: Box
    wanted_box: Box
    local_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRead:
    """One read of a stored chunk, which fills all its pieces."""

    box: Box
    """The elements that are read (global offsets); the pieces fill it, each element once."""
    pieces: tuple[PieceRead, ...]

    @property
    def fqn(self) -> str:
        """The tensor's name in the state."""
        return self.pieces[0].fqn

    @property
    def stored_fqn(self) -> str:
        """The tensor's name in the checkpoint."""
        return self.pieces[0].stored_fqn


def plan_tensor_reads(
    fqn: str, local: Mapping[int, Box], found: StoredTensor, stored_fqn: str
) -> tuple[PieceRead, ...]:
    """Plan to read every element of every local box once, from the tensor `found` under the name `stored_fqn`.

    `local` has this rank's boxes, as `TensorLayout.local_boxes` returns them: copies of a box on this rank are read
    once too. Raises LayoutError if the stored chunks overlap, or lack elements, in what this rank holds.
    """
    boxes = tuple(local.values())
    if len(boxes) == 1 and boxes == found.boxes and boxes[0].volume > 0:
        # Most tensors are one chunk that is wanted whole: nothing has to be intersected or checked.
        return (PieceRead(fqn, stored_fqn, 0, boxes[0], boxes[0], *local),)
    pieces = tuple(
        PieceRead(
            fqn=fqn,
            stored_fqn=stored_fqn,
            stored_index=number,
            stored_box=found.boxes[number],
            wanted_box=common,
            local_index=local_index,
        )
        for local_index, parts in zip(local, find_intersections(boxes, found.boxes), strict=True)
        for number, common in parts
    )
    # Local boxes are disjoint, so parts of them overlap only where stored chunks do.
    check_disjoint(stored_fqn, [piece.wanted_box for piece in pieces])
    wanted = sum(box.volume for box in boxes)
    lacking = wanted - sum(piece.wanted_box.volume for piece in pieces)
    if lacking:
        raise LayoutError(
            f"{stored_fqn}: the chunks lack {lacking} of {wanted} elements that this rank holds"
        )
    return pieces


def find_intersections(wanted: Sequence[Box], stored: Sequence[Box]) -> list[list[tuple[int, Box]]]:
    """Return for each wanted box the numbers of the stored boxes that it overlaps, ascending, with the common parts."""
    if len(stored) <= _FEW:
        return [
            [(n, common) for n, box in enumerate(stored) if (common := box.intersect(each)) is not None]
            for each in wanted
        ]
    starts = np.array([box.offsets for box in stored], dtype=np.int64)
    ends = starts + np.array([box.sizes for box in stored], dtype=np.int64)
    found = []
    for box in wanted:
        lows, highs = np.maximum(starts, box.offsets), np.minimum(ends, box.ends)
        numbers = np.flatnonzero((lows < highs).all(axis=1))
        sizes = (highs - lows)[numbers].tolist()
        corners = zip(numbers.tolist(), lows[numbers].tolist(), sizes, strict=True)
        found.append([(n, Box(offsets=tuple(low), sizes=tuple(size))) for n, low, size in corners])
    return found


def group_by_chunk(pieces: Sequence[PieceRead]) -> tuple[ChunkRead, ...]:
    """Join the pieces of each stored chunk into one read, if together they are a box; else read them one by one.

    A reader that takes a chunk from its file as a whole then takes it once, however many local shards it fills.
    """
    by_chunk: dict[tuple[str, int], list[PieceRead]] = {}
    for piece in pieces:
        by_chunk.setdefault((piece.fqn, piece.stored_index), []).append(piece)
    return tuple(read for group in by_chunk.values() for read in _joined(tuple(group)))


def _joined(pieces: tuple[PieceRead, ...]) -> Iterator[ChunkRead]:
    if len(pieces) == 1:
        yield ChunkRead(box=pieces[0].wanted_box, pieces=pieces)
        return
    boxes = [piece.wanted_box for piece in pieces]
    starts = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    ends = tuple(map(max, zip(*(box.ends for box in boxes), strict=True)))
    around = Box(offsets=starts, sizes=tuple(e - s for s, e in zip(starts, ends, strict=True)))
    # Local boxes are disjoint, so equal volumes mean that nothing unwanted is between them.
    if sum(box.volume for box in boxes) == around.volume:
        yield ChunkRead(box=around, pieces=pieces)
    else:
        yield from (ChunkRead(box=piece.wanted_box, pieces=(piece,)) for piece in pieces)
