"""Tensors that lie in several chunks are read in C's order, in small pieces."""

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from typing_extensions import override

from stepkeeper_planners.formats import checkpoint_reader
from stepkeeper_planners.formats.checkpoint_files import LocalFolder
from stepkeeper_planners.geometry.boxes import Box

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled:UserWarning", "ignore:TypedStorage is deprecated:UserWarning"
)


class InParts(DefaultSavePlanner):
    """Writes the tensor cut at these places along each dimension, the last part first."""

    def __init__(self, cuts: tuple[tuple[int, ...], ...]) -> None:
        super().__init__()
        self._cuts = cuts

    @override
    def create_local_plan(self) -> SavePlan:
        (fqn,) = self.state_dict
        parts = [list(pairwise(places)) for places in self._cuts]
        items = [self._item(fqn, part) for part in product(*parts)]
        self.plan = replace(super().create_local_plan(), items=items[::-1])
        return self.plan

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        box = Box(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes))
        part: torch.Tensor = self.state_dict[write_item.index.fqn][box.slices].contiguous()
        return part

    def _item(self, fqn: str, part: tuple[tuple[int, int], ...]) -> WriteItem:
        offsets = torch.Size([start for start, _ in part])
        tensor = self.state_dict[fqn]
        return WriteItem(
            index=MetadataIndex(fqn, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(
                    offsets=offsets, sizes=torch.Size([end - start for start, end in part])
                ),
                properties=TensorProperties(dtype=tensor.dtype),
                size=tensor.size(),
            ),
        )


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
    save({"w": tensor}, storage_writer=FileSystemWriter(tmp_path), planner=InParts(cuts), no_dist=True)
    monkeypatch.setattr(checkpoint_reader, "BUFFER_BYTES", buffer_bytes)
    pieces = [
        bytes(piece) for piece in checkpoint_reader.open_checkpoint(LocalFolder(tmp_path)).read_elements("w")
    ]
    assert b"".join(pieces) == tensor.numpy().tobytes()
    row_bytes = 5 * 3 * dtype.itemsize
    assert max(map(len, pieces)) <= max(buffer_bytes, row_bytes)
