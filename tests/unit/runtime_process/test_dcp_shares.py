"""Test what a rank's items become."""

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from stepkeeper.dcp.shares import Share
from stepkeeper.errors import SaveError


@pytest.mark.parametrize("other", [torch.zeros(4), torch.zeros(5, dtype=torch.int32)])
def test_a_planner_that_gives_something_else_is_refused(other: torch.Tensor) -> None:
    chunk = ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([5]))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size([5]))
    item = WriteItem(MetadataIndex("w", chunk.offsets), WriteItemType.TENSOR, tensor_data=data)
    share = Share([item], lambda _item: other)
    with pytest.raises(SaveError, match=r"w: the planner said float32\[5\] and gave"):
        share[0:20]
