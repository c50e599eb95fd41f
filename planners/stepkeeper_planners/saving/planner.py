"""Plan a save for `torch.distributed.checkpoint.save`."""

import io
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from typing_extensions import override

from stepkeeper_planners import adapters
from stepkeeper_planners.adapters.open_shardings import keep_shardings_open
from stepkeeper_planners.errors import UnsupportedWriterError
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.process_groups import current_ranks, single_rank
from stepkeeper_planners.saving.differing_copies import group_ranks
from stepkeeper_planners.saving.global_metadata import GlobalMetadata
from stepkeeper_planners.saving.planned_state import PlannedState
from stepkeeper_planners.saving.proposals import Answer, check_proposals, group_by_fingerprint
from stepkeeper_planners.saving.write_items import OwnItems, WriteData
from stepkeeper_planners.state.tree import FlatState, flatten_state
from stepkeeper_planners.state.values import encode_value

_OF_HUGGING_FACE: Final = {"shard_index", "fqn_to_index_mapping"}
"""The keys that torch's HuggingFaceStorageWriter adds to a plan, by which it is recognized."""


class SPMDSavePlanner(SavePlanner):
    """Write every element of every tensor once, over all ranks and replicas.

    Pass a new planner to each `dcp.save` or `dcp.async_save`. It works with torch's storage writers. Each rank computes
    its own share of the writes. Ranks exchange a fingerprint of their state with the coordinator; they compare names
    only where fingerprints differ. Ranks may hold different names, or different parts of a tensor, as pipeline stages
    do. If an entry differs on ranks that all should save it alike, nothing is written and RanksDifferError is raised.
    Copies of a tensor that only drifted apart, and tensors in bare dicts, are the first rank's then, with a warning.
    Tied tensors are written once, and can be read under each of their names.

    Args:
        process_group: the ranks that save together; None for all processes. Pass the group that `dcp.save` is given.

    Ranks: every rank of the group makes a planner, and passes it to the save.
    """

    def __init__(self, *, process_group: dist.ProcessGroup | None = None) -> None:
        self.is_coordinator = False
        """True on the rank that makes the global plan."""

        self.mappings: dict[str, tuple[str | int, ...]] = {}
        """The keys that lead to each flat name."""

        self.sharded_state_dict: dict[str, torch.Tensor] = {}
        """The tensors that are sharded over several devices, by flat name."""

        self.unsharded_state_dict: dict[str, Any] = {}
        """All other tensors, and the values, by flat name."""

        self._group = process_group
        self._flat = FlatState(tensors={}, values={})
        self._write_data = WriteData({}, {})
        self._state = PlannedState(self._flat, {}, Ranks(rank=0, world_size=1))
        self._metadata = GlobalMetadata({})

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | bool | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state, and start the pending computations on XLA devices.

        Args:
            state_dict: the state to save; nested dicts and lists of tensors, values, Stateful objects and PerRank.
            storage_meta: not used, unless it is True or False: torch_xla's planner has `is_coordinator` in this place.
            is_coordinator: whether this rank makes the global plan.

        Raises:
            DuplicateNameError: two entries get the same name.
            UnsupportedValueError: a Stateful holds itself.

        Ranks: torch.distributed.checkpoint calls it on all ranks.
        """
        self.is_coordinator = storage_meta if isinstance(storage_meta, bool) else is_coordinator
        self._metadata = GlobalMetadata({})
        self._flat = flatten_state(state_dict)
        tensors = self._flat.tensors
        adapters.materialize(tensors.values())
        named = {**tensors, **{name: tensors[first] for name, first in self._flat.aliases.items()}}
        self.mappings = dict(self._flat.paths)
        self.sharded_state_dict = adapters.select_sharded(named)
        rest = {k: t for k, t in named.items() if k not in self.sharded_state_dict}
        self.unsharded_state_dict = {**rest, **self._flat.values}
        with keep_shardings_open(tensors.values()):
            self._write_data = WriteData(tensors, adapters.deduplicate_copies(tensors))

    @override
    def create_local_plan(self) -> SavePlan:
        """Compute this rank's writes, without asking the other ranks.

        Returns:
            The plan with this rank's items; its `planner_data` is the proposal for the coordinator.

        Raises:
            UnsupportedShardingError: a tensor's placement doesn't determine which device holds what.
            UnsupportedValueError: a value is of a type that isn't stored.
            LayoutError: chunks overlap or leave a gap.

        Ranks: torch.distributed.checkpoint calls it on all ranks.
        """
        self._plan(current_ranks(self._group))
        if self._state.ranks.world_size == 1:  # no other rank has parts
            self._state.join_parts([self._state.list_incomplete()])
        return SavePlan(items=self._make_own_items(), planner_data=self._state.make_proposal())

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Answer each rank's proposal, and make the metadata of the whole checkpoint.

        The coordinator derives both from its own state, since the ranks' states have one fingerprint. Where they
        don't, `finish_plan` completes the metadata.

        Args:
            all_plans: the local plans, by rank.

        Returns:
            A plan for each rank with the coordinator's answer, and the checkpoint's metadata.

        Raises:
            WrongRanksError: the plans are not those of the ranks that this planner knows of.
            ReleasesDifferError: ranks would divide the same state in other ways.
            LayoutError: parts of a tensor that only the ranks together can describe don't fit together.

        Ranks: torch.distributed.checkpoint calls it on the coordinator only.
        """
        if len(all_plans) == 1 and self._state.ranks.world_size != 1:
            # A save with no_dist is of this process alone.
            self._plan(single_rank())
            proposals = [self._state.make_proposal()]
        else:
            proposals = check_proposals(
                [plan.planner_data for plan in all_plans], self._state.ranks.world_size
            )
        groups = group_by_fingerprint(proposals)
        joined = self._state.join_parts([proposal.parts for proposal in proposals])
        if len(groups) == 1:
            self._metadata = self._state.build_metadata()
        # Every rank makes its own items.
        # The digests are of the layouts that each rank could describe alone.
        is_joined = any(
            len(chunk.owners) > 1 and chunk.box.volume for layout in joined for chunk in layout.chunks
        )
        is_known = len(proposals) == 1 or not (len(groups) > 1 or is_joined)
        differing = group_ranks([proposal.copies for proposal in proposals]) if is_known else None
        answer = Answer(groups=groups, joined=joined, differing=differing)
        return [replace(plan, items=OwnItems(), planner_data=answer) for plan in all_plans], self._metadata

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Complete this rank's plan with its own items.

        Where their states or copies differ, the ranks exchange names.

        Args:
            new_plan: the coordinator's plan for this rank, with the storage writer's additions.

        Returns:
            The plan with this rank's items.

        Raises:
            RanksDifferError: an entry that all ranks should save alike differs. Raised on all ranks.
            LayoutError: the parts that ranks hold of a tensor don't make it whole. Raised on all ranks.
            UnsupportedWriterError: it is torch's HuggingFaceStorageWriter. Raised on all ranks.

        Ranks: torch.distributed.checkpoint calls it on all ranks; collective where the states differ.
        """
        answer = new_plan.planner_data
        if isinstance(answer, Answer) and not self.is_coordinator:  # which has joined them itself
            self._state.add_joined(answer.joined)
        if isinstance(answer, Answer) and len(answer.groups) > 1:
            self._state.merge(answer.groups, self._group)
        if isinstance(answer, Answer):
            is_changed = self._state.compare_copies(answer.differing, answer.groups, self._group)
            if self.is_coordinator and (is_changed or len(answer.groups) > 1):
                self._complete_metadata()
        if isinstance(new_plan.storage_data, dict) and not set(new_plan.storage_data) - _OF_HUGGING_FACE:
            raise UnsupportedWriterError(
                "HuggingFaceStorageWriter can't store values, or several parts of a tensor: save with "
                "FileSystemWriter, and convert with checkpoint_to_safetensors() of stepkeeper_planners.formats"
            )
        # A subclass or a storage writer has made other items.
        if not isinstance(new_plan.items, OwnItems):
            return new_plan
        items = self._make_own_items()
        self._write_data.drop_copies_without_writes()
        return replace(new_plan, items=items, planner_data=None)

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of an item. The storage writer calls it once for each item, from any thread.

        All local shards of a tensor are moved from the devices together, and released after the tensor's last item.

        Args:
            write_item: one of this rank's items.

        Returns:
            A CPU tensor of the item's shape and dtype; for a value, its encoded bytes.

        Raises:
            UnsupportedValueError: a value is of a type that isn't stored.
        """
        data: torch.Tensor | io.BytesIO = self.transform_object(
            write_item, self.lookup_object(write_item.index)
        )
        if write_item.index in self._write_data:
            self._write_data.release_piece(write_item.index)
        return data

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return an item's data: elements on the CPU, or a value. Subclasses may take it from elsewhere.

        Args:
            index: the index of one of this rank's items.

        Returns:
            A CPU tensor, or the value before it is encoded.
        """
        if index in self._write_data:
            return self._write_data.load_piece(index)
        return self._state.own_values[index.fqn]

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 — subclasses of torch's and torch_xla's planners have this name
        """Return the data for the storage writer: elements as they are, a value encoded. Subclasses may change it.

        Args:
            write_item: one of this rank's items.
            object: the result of `lookup_object` for it.

        Returns:
            The tensor; for a value, a buffer of its encoded bytes.

        Raises:
            UnsupportedValueError: a value is of a type that isn't stored.
        """
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        name = write_item.index.fqn
        # `PerRank` values are encoded already; but a subclass's lookup_object may return another object.
        is_own = object is self._state.own_values.get(name)
        blob = self._state.blobs.get(name) if is_own else None
        return io.BytesIO(encode_value(name, object) if blob is None else blob)

    def _plan(self, ranks: Ranks) -> None:
        self._state = PlannedState(self._flat, self._write_data.tensors, ranks)

    def _make_own_items(self) -> OwnItems:
        """Make this rank's items, and let them be resolved."""
        # The items of the writes come first, in their order; those of values follow.
        items, writes = self._state.make_items()
        self._write_data.set_writes({item.index: write for item, write in zip(items, writes, strict=False)})
        return OwnItems(items)

    def _complete_metadata(self) -> None:
        # The storage writer already holds this object, and reads it when all is written.
        whole = self._state.build_metadata()
        self._metadata.state_dict_metadata = whole.state_dict_metadata
        self._metadata.planner_data = whole.planner_data
        self._metadata.aliases = whole.aliases
