"""The plan of a save, for torch.distributed.checkpoint's `save`."""

import io
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from typing_extensions import override

from stepkeeper_planners import adapters
from stepkeeper_planners.assign import TensorWrite, plan_save
from stepkeeper_planners.boxes import Box
from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.layout import Ranks, check_cover
from stepkeeper_planners.state import FlatState, gather_state
from stepkeeper_planners.values import encode_value


def current_ranks() -> Ranks:
    """This process among those of the default process group; alone where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(rank=0, world_size=1)
    return Ranks(rank=dist.get_rank(), world_size=dist.get_world_size())


class SPMDSavePlanner(SavePlanner):
    """Writes every chunk of every tensor once, over all ranks and copies. Pass one to `dcp.save`; for one save each.

    Works with torch's FileSystemWriter and others of its kind. Tied tensors stand under each of their names.
    """

    def __init__(self) -> None:
        self.is_coordinator = False
        self.sharded_state_dict: dict[str, torch.Tensor] = {}
        """What lies in parts on several devices, by flat name."""
        self.unsharded_state_dict: dict[str, Any] = {}
        """All the rest, values too."""
        self._flat = FlatState(tensors={}, values={})
        self._tensors: dict[str, torch.Tensor] = {}
        self._writes: dict[MetadataIndex, TensorWrite] = {}
        self._open_items: dict[str, int] = {}
        self._shards: dict[str, list[torch.Tensor]] = {}
        self._lock = threading.Lock()

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """The state is flat; what was pending on XLA devices is on its way.

        Raises:
            DuplicateNameError: two entries get the same name.
        """
        self.is_coordinator = is_coordinator
        self._flat = gather_state(state_dict)
        adapters.materialize(self._flat.tensors)
        self._tensors = self._with_aliases(self._flat.tensors)
        self.sharded_state_dict = {k: t for k, t in self._tensors.items() if adapters.is_sharded(t)}
        rest = {k: t for k, t in self._tensors.items() if k not in self.sharded_state_dict}
        moved = adapters.without_copies(self._flat.tensors)
        self._tensors = self._with_aliases({**self._flat.tensors, **moved})
        self.unsharded_state_dict = {**rest, **self._flat.values}

    def _with_aliases(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, **{name: tensors[first] for name, first in self._flat.aliases.items()}}

    @override
    def create_local_plan(self) -> SavePlan:
        """What this rank writes, computed without asking the others.

        Raises:
            UnsupportedShardingError: a tensor's placement doesn't say which device holds what.
            LayoutError: chunks overlap or leave a gap.
        """
        ranks = current_ranks()
        layouts = [adapters.describe(fqn, tensor, ranks) for fqn, tensor in self._tensors.items()]
        plan = plan_save(layouts, list(self._flat.values), ranks)
        items = [_tensor_item(write) for write in plan.tensors]
        self._writes = {item.index: write for item, write in zip(items, plan.tensors, strict=True)}
        self._open_items = {}
        for write in plan.tensors:
            self._open_items[write.fqn] = self._open_items.get(write.fqn, 0) + 1
        items += [WriteItem(index=MetadataIndex(fqn), type=WriteItemType.BYTE_IO) for fqn in plan.values]
        return SavePlan(items=items, planner_data=dict(self._flat.paths))

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The ranks' own plans and the metadata of the whole.

        Raises:
            LayoutError: taken together the plans write something twice or not at all.
        """
        plans, metadata = create_default_global_save_plan(all_plans)
        for fqn, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                boxes = [Box(offsets=tuple(c.offsets), sizes=tuple(c.sizes)) for c in stored.chunks]
                check_cover(fqn, tuple(stored.size), boxes)
        paths = {fqn: path for plan in plans for fqn, path in (plan.planner_data or {}).items()}
        metadata.planner_data = paths
        return plans, metadata

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan, unchanged."""
        return new_plan

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The item's bytes. A tensor's shards are moved from the devices together, and let go after the last one.

        Raises:
            UnsupportedValueError: a value is of a type that isn't stored.
        """
        if write_item.type == WriteItemType.BYTE_IO:
            fqn = write_item.index.fqn
            return io.BytesIO(encode_value(fqn, self._flat.values[fqn]))
        write = self._writes[write_item.index]
        # Writers call from several threads.
        with self._lock:
            if write.fqn not in self._shards:
                self._shards[write.fqn] = adapters.local_shards(self._tensors[write.fqn])
            shard = self._shards[write.fqn][write.local_index]
            self._open_items[write.fqn] -= 1
            if not self._open_items[write.fqn]:
                del self._shards[write.fqn]
        return shard


def _tensor_item(write: TensorWrite) -> WriteItem:
    offsets, sizes = torch.Size(write.box.offsets), torch.Size(write.box.sizes)
    return WriteItem(
        index=MetadataIndex(write.fqn, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=dtype_of(write.dtype)),
            size=torch.Size(write.global_shape),
        ),
    )
