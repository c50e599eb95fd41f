"""Reading into place: each tensor's parts, read ahead by several threads."""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch

from stepkeeper.checkpoint import CheckpointReader
from stepkeeper.manifest import ChunkRecord, TensorRecord, ValueRecord
from stepkeeper_planners.boxes import Box
from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.layout import TensorLayout
from stepkeeper_planners.matching import StateReads, Wanted
from stepkeeper_planners.reshard import PieceRead, StoredTensor
from stepkeeper_planners.values import decode_value

__all__ = ["loads_of", "read_ahead", "read_value", "stored_tensor"]

_READ_AHEAD: Final = 8
"""Tensors that are being read while one is filled: bounds host memory."""


def read_value(reader: CheckpointReader, name: str, value: ValueRecord) -> object:
    return decode_value(name, reader.read_verified(value.path, value.offset_bytes, value.length_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One tensor of this rank."""

    layout: TensorLayout
    boxes: dict[int, Box]
    pieces: tuple[PieceRead, ...]
    stored: TensorRecord


def stored_tensor(tensor: TensorRecord) -> StoredTensor:
    boxes = tuple(Box(offsets=chunk.offsets, sizes=chunk.sizes) for chunk in tensor.chunks)
    return StoredTensor(
        dtype=tensor.dtype, global_shape=tensor.global_shape, boxes=boxes, data=tuple(tensor.chunks)
    )


def loads_of(
    wanted: Wanted, reads: StateReads, tensors: Mapping[str, TensorRecord], rank: int
) -> Iterator[Load]:
    by_fqn: dict[str, list[PieceRead]] = {}
    for piece in reads.pieces:
        by_fqn.setdefault(piece.fqn, []).append(piece)
    for layout in wanted.layouts:
        pieces = by_fqn.get(layout.fqn)
        if pieces:
            stored = tensors[pieces[0].stored_fqn]
            yield Load(layout=layout, boxes=layout.local_boxes(rank), pieces=tuple(pieces), stored=stored)


def read_ahead(
    reader: CheckpointReader, loads: Iterator[Load]
) -> Iterator[tuple[Load, dict[int, torch.Tensor]]]:
    """Each tensor's local shards, read by several threads, a bounded number ahead of who takes them."""
    waiting: deque[tuple[Load, Future[dict[int, torch.Tensor]]]] = deque()
    with ThreadPoolExecutor(max_workers=_READ_AHEAD, thread_name_prefix="restore") as threads:
        for load in loads:
            waiting.append((load, threads.submit(_read_shards, reader, load)))
            if len(waiting) > _READ_AHEAD:
                first, shards = waiting.popleft()
                yield first, shards.result()
        while waiting:
            first, shards = waiting.popleft()
            yield first, shards.result()


def _read_shards(reader: CheckpointReader, load: Load) -> dict[int, torch.Tensor]:
    dtype = dtype_of(load.layout.dtype)
    shards = {index: torch.empty(box.sizes, dtype=dtype) for index, box in load.boxes.items()}
    for piece in load.pieces:
        chunk = load.stored.chunks[piece.stored_index]
        source = _read_rows(reader, chunk, piece, dtype)
        target = shards[piece.local_index]
        within = piece.wanted_box.shifted(load.boxes[piece.local_index].offsets)
        target[within.slices].copy_(source)
    return shards


def _read_rows(
    reader: CheckpointReader, chunk: ChunkRecord, piece: PieceRead, dtype: torch.dtype
) -> torch.Tensor:
    """The wanted box, cut from the rows of the stored chunk that hold it: one contiguous read."""
    wanted = piece.wanted_box.shifted(piece.stored_box.offsets)
    first, n_rows = (wanted.offsets[0], wanted.sizes[0]) if wanted.sizes else (0, 1)
    row_shape = chunk.sizes[1:]
    row_bytes = math.prod(row_shape) * dtype.itemsize
    start = chunk.offset_bytes + chunk.data_offset_bytes + first * row_bytes
    data = bytearray(reader.read_verified(chunk.path, start, n_rows * row_bytes))
    rows = torch.frombuffer(data, dtype=dtype)
    if not wanted.sizes:
        return rows.view(())
    return rows.view(n_rows, *row_shape)[(slice(None), *wanted.slices[1:])]
