"""Test what a rank's items become, and what `.metadata` says of them."""

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from stepkeeper.checkpoint.inventory import ChunkRecord
from stepkeeper.dcp.shares import Share
from stepkeeper.errors import SaveError


def make_tensor_item(fqn: str, tensor: torch.Tensor) -> WriteItem:
    size = tensor.shape
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=tensor.dtype), size=size)
    return WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.TENSOR, tensor_data=data)


def make_value_item(fqn: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO)


class Planner:
    """Has these tensors and values, and counts who is asked for how often."""

    def __init__(self, **held: Any) -> None:
        self.held = held
        self.asked: list[str] = []

    def resolve(self, item: WriteItem) -> Any:
        self.asked.append(item.index.fqn)
        return self.held[item.index.fqn]

    def items(self) -> list[WriteItem]:
        return [
            make_tensor_item(fqn, value) if isinstance(value, torch.Tensor) else make_value_item(fqn)
            for fqn, value in self.held.items()
        ]


@pytest.mark.parametrize("other", [torch.zeros(4), torch.zeros(5, dtype=torch.int32)])
def test_a_planner_that_gives_something_else_is_refused(other: torch.Tensor) -> None:
    planner = Planner(w=torch.zeros(5))
    share = Share(planner.items(), planner.resolve)
    planner.held["w"] = other
    with pytest.raises(SaveError, match=r"w: the planner said float32\[5\] and gave"):
        share[0:20]


def chunk(offset: int, size: int, path: str) -> ChunkRecord:
    return ChunkRecord(
        offsets=(offset,), sizes=(size,), path=path, offset_bytes=8, length_bytes=99, data_offset_bytes=64
    )
