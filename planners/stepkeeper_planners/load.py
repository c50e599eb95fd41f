"""The plan of a load, for torch.distributed.checkpoint's `load`."""

import io
from collections import Counter
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from typing_extensions import override

from stepkeeper_planners import adapters
from stepkeeper_planners.boxes import Box
from stepkeeper_planners.dtypes import dtype_name
from stepkeeper_planners.reshard import PieceRead, StoredTensor, plan_load
from stepkeeper_planners.save import current_ranks
from stepkeeper_planners.state import FlatState, gather_state, scatter_state
from stepkeeper_planners.values import decode_value


class SPMDLoadPlanner(LoadPlanner):
    """Reads into the state's own tensors, whatever layout was saved. Pass one to `dcp.load`; for one load each.

    The state is where it belongs already: tensors on their devices, with their shardings. What the checkpoint
    holds beyond the state is left alone, as torch does.
    """

    def __init__(self) -> None:
        self.is_coordinator = False
        self.metadata: Metadata | None = None
        self.original_state_dict: dict[str, Any] = {}
        self.sharded_state_dict: dict[str, torch.Tensor] = {}
        """What lies in parts on several devices, by flat name."""
        self.unsharded_state_dict: dict[str, object] = {}
        """All the rest, values too."""
        self._flat = FlatState(tensors={}, values={})
        self._boxes: dict[str, dict[int, Box]] = {}
        self._buffers: dict[str, dict[int, torch.Tensor]] = {}
        self._open_reads: Counter[str] = Counter()
        self._values: dict[str, object] = {}

    @override
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """The state is flat, ready to be compared with the checkpoint.

        Raises:
            DuplicateNameError: two entries get the same name.
            ValueError: there is no metadata.
        """
        if metadata is None:
            raise ValueError("a load is planned from the checkpoint's metadata, got None")
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self.original_state_dict = state_dict
        self._flat = gather_state(state_dict)
        tensors = self._flat.tensors
        self.sharded_state_dict = {k: t for k, t in tensors.items() if adapters.is_sharded(t)}
        rest = {k: t for k, t in tensors.items() if k not in self.sharded_state_dict}
        self.unsharded_state_dict = {**rest, **self._flat.values}

    @override
    def create_local_plan(self) -> LoadPlan:
        """What this rank reads: every element of its local boxes once.

        Raises:
            LoadMismatchError: names are missing, or shapes or dtypes differ; all in one report.
            UnsupportedShardingError: a tensor's placement doesn't say which device holds what.
        """
        assert self.metadata is not None
        ranks = current_ranks()
        stored, stored_values = _stored(self.metadata)
        layouts = [adapters.describe(fqn, tensor, ranks) for fqn, tensor in self._flat.tensors.items()]
        keys = tuple(self._flat.values)
        pieces = plan_load(
            layouts, stored, ranks, value_keys=keys, stored_value_keys=stored_values, allow_unexpected=True
        )
        self._boxes = {layout.fqn: layout.local_boxes(ranks.rank) for layout in layouts}
        self._open_reads = Counter(piece.fqn for piece in pieces)
        self._open_reads.update(keys)
        self._buffers = {}
        items = [self._tensor_read(piece) for piece in pieces] + [_value_read(key) for key in keys]
        return LoadPlan(items=items)

    @override
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The ranks' own plans, unchanged."""
        return global_plan

    @override
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged; where there is nothing to read the load is complete."""
        if not self._open_reads:
            self._finish()
        return central_plan

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """The value is kept until all is read.

        Raises:
            ValueDecodeError: damaged bytes, or a type that isn't on the list.
        """
        fqn = read_item.dest_index.fqn
        self._values[fqn] = decode_value(fqn, value.read())
        self._close_read(fqn)

    @override
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where the item's elements go: part of a CPU buffer of the local shard."""
        index = read_item.dest_index
        assert index.index is not None
        buffers = self._buffers.setdefault(index.fqn, {})
        if index.index not in buffers:
            sizes = self._boxes[index.fqn][index.index].sizes
            buffers[index.index] = torch.empty(sizes, dtype=self._flat.tensors[index.fqn].dtype)
        part = Box(offsets=tuple(read_item.dest_offsets), sizes=tuple(read_item.lengths))
        return buffers[index.index][part.slices]

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The item's elements are in; after a tensor's last one it is filled and its buffers let go."""
        fqn = read_item.dest_index.fqn
        if self._open_reads[fqn] == 1:
            adapters.fill(self._flat.tensors[fqn], self._buffers.pop(fqn))
        self._close_read(fqn)

    def _close_read(self, fqn: str) -> None:
        self._open_reads[fqn] -= 1
        if not self._open_reads[fqn]:
            del self._open_reads[fqn]
        if not self._open_reads:
            self._finish()

    def _finish(self) -> None:
        scatter_state(self.original_state_dict, self._flat, self._values)
        adapters.materialize(self._flat.tensors)

    def _tensor_read(self, piece: PieceRead) -> ReadItem:
        local = self._boxes[piece.fqn][piece.local_index]
        return ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(piece.fqn, torch.Size(local.offsets), piece.local_index),
            dest_offsets=torch.Size(piece.wanted_box.shifted(local.offsets).offsets),
            storage_index=MetadataIndex(piece.fqn, torch.Size(piece.stored_box.offsets), piece.stored_index),
            storage_offsets=torch.Size(piece.wanted_box.shifted(piece.stored_box.offsets).offsets),
            lengths=torch.Size(piece.wanted_box.sizes),
        )


def _value_read(fqn: str) -> ReadItem:
    nothing = torch.Size((0,))
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(fqn),
        dest_offsets=nothing,
        storage_index=MetadataIndex(fqn),
        storage_offsets=nothing,
        lengths=nothing,
    )


def _stored(metadata: Metadata) -> tuple[dict[str, StoredTensor], list[str]]:
    """The checkpoint's tensors, and the names of its values."""
    tensors: dict[str, StoredTensor] = {}
    values: list[str] = []
    for fqn, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            boxes = tuple(Box(offsets=tuple(c.offsets), sizes=tuple(c.sizes)) for c in stored.chunks)
            tensors[fqn] = StoredTensor(
                dtype=dtype_name(stored.properties.dtype), global_shape=tuple(stored.size), boxes=boxes
            )
        else:
            values.append(fqn)
    return tensors, values
