"""Tensors that lie in several chunks are read in C's order, in small pieces."""

from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from planners_parts.parts import parts_in, parts_of
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners import SPMDSavePlanner
from stepkeeper_planners.formats import checkpoint_reader
from stepkeeper_planners.formats.checkpoint_files import LocalFolder
from stepkeeper_planners.geometry.boxes import Box


@pytest.mark.parametrize("buffer_bytes", [1, 50, 1 << 20])
@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param(((0, 7), (0, 5), (0, 3)), id="whole"),
        pytest.param(((0, 2, 7), (0, 5), (0, 3)), id="rows"),
        pytest.param(((0, 7), (0, 1, 5), (0, 3)), id="columns"),
        pytest.param(((0, 3, 6, 7), (0, 2, 5), (0, 1, 2, 3)), id="all ways"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.complex128])
def test_chunks_are_put_together(
    dtype: torch.dtype,
    cuts: tuple[tuple[int, ...], ...],
    buffer_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = torch.arange(105).reshape(7, 5, 3).to(dtype)
    boxes = [
        Box(offsets=tuple(start for start, _ in cell), sizes=tuple(end - start for start, end in cell))
        for cell in product(*(list(pairwise(places)) for places in cuts))
    ]
    parts = parts_of(boxes[::-1], (7, 5, 3), dtype)
    for box, part in parts_in(parts):
        part.copy_(tensor[box.slices])
    save({"w": parts}, storage_writer=FileSystemWriter(tmp_path), planner=SPMDSavePlanner(), no_dist=True)
    monkeypatch.setattr(checkpoint_reader, "BUFFER_BYTES", buffer_bytes)
    pieces = [
        bytes(piece) for piece in checkpoint_reader.open_checkpoint(LocalFolder(tmp_path)).read_elements("w")
    ]
    assert b"".join(pieces) == tensor.numpy().tobytes()
    row_bytes = 5 * 3 * dtype.itemsize
    assert max(map(len, pieces)) <= max(buffer_bytes, row_bytes)
