"""Planning as torch's DefaultSavePlanner does it: every rank's local plan, gathered; one global plan, validated."""

import logging

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.geometry.layout import TensorLayout


def local_plans(layouts: list[TensorLayout], world_size: int) -> list[SavePlan]:
    """Return each rank's proposal: an item for each part that it holds. Equal items are shared, to save memory."""
    items: list[list[WriteItem]] = [[] for _ in range(world_size)]
    for layout in layouts:
        properties = TensorProperties(dtype=dtype_of(layout.dtype))
        size = torch.Size(layout.global_shape)
        for chunk in layout.chunks:
            offsets, sizes = torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes)
            item = WriteItem(
                index=MetadataIndex(layout.fqn, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes), properties=properties, size=size
                ),
            )
            for owner in chunk.owners:
                items[owner.rank].append(item)
    return [SavePlan(items=those, planner_data={}) for those in items]


def plan_all(plans: list[SavePlan]) -> int:
    """Do the coordinator's part: leave out copies, make metadata, validate all. Return the number of pieces written."""
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    planner = DefaultSavePlanner()
    planner.set_up_planner({}, is_coordinator=True)
    final, _ = planner.create_global_plan(plans)
    return sum(len(plan.items) for plan in final)
