"""What to read: the stored boxes cut with the boxes that this rank holds, whatever layout was saved."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stepkeeper_planners.boxes import Box
from stepkeeper_planners.errors import LoadMismatchError
from stepkeeper_planners.layout import Ranks, TensorLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as a checkpoint holds it."""

    dtype: str
    global_shape: tuple[int, ...]
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRead:
    """One read: `wanted_box` (global coordinates) of the stored chunk, into the local shard at `local_index`."""

    fqn: str
    stored_index: int
    stored_box: Box
    wanted_box: Box
    local_index: int


def plan_load(
    layouts: Sequence[TensorLayout],
    stored: Mapping[str, StoredTensor],
    ranks: Ranks,
    *,
    value_keys: Collection[str] = (),
    alias_keys: Collection[str] = (),
    stored_value_keys: Collection[str] = (),
    allow_unexpected: bool = False,
) -> tuple[PieceRead, ...]:
    """Every element of every local box is read exactly once; copies on this rank are read once too.

    `alias_keys` are further names of tied tensors: a checkpoint may have them, nothing is read for them.

    Raises:
        LoadMismatchError: names are missing or unexpected, or shapes, dtypes or kinds differ; all in one report.
    """
    mismatched: dict[str, str] = {}
    missing: list[str] = []
    reads: list[PieceRead] = []
    for layout in layouts:
        found = stored.get(layout.fqn)
        if found is None:
            if layout.fqn in stored_value_keys:
                mismatched[layout.fqn] = "the checkpoint holds a plain value, the state a tensor"
            else:
                missing.append(layout.fqn)
        elif reason := _difference(layout, found):
            mismatched[layout.fqn] = reason
        else:
            pieces, lacking = _pieces(layout, found, ranks)
            reads.extend(pieces)
            if lacking:
                mismatched[layout.fqn] = (
                    f"the checkpoint's chunks lack {lacking} elements of what this rank holds"
                )
    for key in value_keys:
        if key in stored:
            mismatched[key] = "the checkpoint holds a tensor, the state a plain value"
        elif key not in stored_value_keys:
            missing.append(key)
    wanted = {layout.fqn for layout in layouts}.union(value_keys, alias_keys)
    unexpected = (
        [] if allow_unexpected else [name for name in (*stored, *stored_value_keys) if name not in wanted]
    )
    if missing or unexpected or mismatched:
        raise LoadMismatchError(missing=sorted(missing), unexpected=sorted(unexpected), mismatched=mismatched)
    return tuple(reads)


def _difference(layout: TensorLayout, found: StoredTensor) -> str | None:
    if found.global_shape != layout.global_shape:
        return f"shape {found.global_shape} in the checkpoint, {layout.global_shape} in the state"
    if found.dtype != layout.dtype:
        return f"dtype {found.dtype} in the checkpoint, {layout.dtype} in the state"
    return None


def _pieces(layout: TensorLayout, found: StoredTensor, ranks: Ranks) -> tuple[list[PieceRead], int]:
    """The reads of one tensor, and how many wanted elements no stored chunk has."""
    pieces: list[PieceRead] = []
    lacking = 0
    for local_index, box in layout.local_boxes(ranks.rank).items():
        parts = list(_parts(layout.fqn, local_index, box, found))
        lacking += box.volume - sum(part.wanted_box.volume for part in parts)
        pieces.extend(parts)
    return pieces, lacking


def _parts(fqn: str, local_index: int, box: Box, found: StoredTensor) -> Iterator[PieceRead]:
    for index, stored_box in enumerate(found.boxes):
        common = box.intersect(stored_box)
        if common is not None:
            yield PieceRead(
                fqn=fqn,
                stored_index=index,
                stored_box=stored_box,
                wanted_box=common,
                local_index=local_index,
            )
