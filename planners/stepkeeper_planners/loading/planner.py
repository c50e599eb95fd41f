"""Plan a load for torch.distributed.checkpoint's `load`, and put the data into the state."""

import io
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from typing_extensions import override

from stepkeeper_planners import adapters
from stepkeeper_planners.errors import WrongRanksError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.loading.differences import (
    Differences,
    Findings,
    build_mismatch_error,
    intersect_unexpected,
    judge_differences,
)
from stepkeeper_planners.loading.fitted_target import FittedTarget
from stepkeeper_planners.loading.load_request import LoadTarget, build_load_request
from stepkeeper_planners.loading.matching import compare
from stepkeeper_planners.loading.pending_reads import LocalReads, PendingReads
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.loading.state_reads import StateReads
from stepkeeper_planners.loading.stored_state import StoredState, collect_stored_state
from stepkeeper_planners.process_groups import current_ranks, single_rank
from stepkeeper_planners.state.filling import finish_load
from stepkeeper_planners.state.tree import FlatState
from stepkeeper_planners.state.values import decode_value


class SPMDLoadPlanner(LoadPlanner):
    """Load a checkpoint, saved with any layout, into the state's own tensors.

    Pass one to `dcp.load`; each planner serves one load. The state's tensors must already be on their devices, with
    their shardings.

    The names, shapes, dtypes and kinds of the state and of the checkpoint must agree. If they don't, all ranks raise
    one error that lists every difference, and nothing is loaded.

    Tensors are filled as their bytes arrive. Values are set, and objects get load_state_dict(), after the last byte.
    So if reading fails, some tensors are old, some are new, and all else is unchanged: load again, or don't use the
    state.

    Host memory: CPU tensors are read in place. Other tensors are collected on the host until all their parts on this
    rank have arrived. torch's FileSystemReader reads file by file, so with it that is this rank's part of all tensors
    that lie in several files.

    Ranks: every rank of `process_group` makes a planner with the same arguments. With `no_dist`, each process loads
    its `PerRank` values as rank 0 of 1, which is how a save with `no_dist` stores them.
    """

    def __init__(
        self,
        *,
        strict: bool = True,
        items: Collection[str] | None = None,
        exclude: Collection[str] = (),
        cast: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Choose the part of the checkpoint that is loaded.

        Args:
            strict: raise for names that only the state or only the checkpoint has. With False, load the names that
                both have and leave the rest of the state as it is: then `skipped` lists the names that the state
                kept, and `unread` the names that only the checkpoint has.
            items: fnmatch patterns of flat names; compare and load only what they match. "model" also matches all of
                "model.…". None means everything.
            exclude: patterns of the same kind; neither compare nor load what they match.
            cast: convert dtypes, as far as `torch.can_cast` allows.
            process_group: the group that `dcp.load` is given; None means all processes.

        Raises:
            PatternError: `items` or `exclude` is one string instead of a collection.
        """
        self.rules = LoadRules(strict=strict, items=items, exclude=exclude, cast=cast)
        self._group = process_group
        self.is_coordinator = False
        self.metadata: Metadata | None = None
        self.original_state_dict: dict[str, Any] = {}
        self.mappings: dict[str, tuple[str | int, ...]] = {}
        """The keys that lead to each flat name."""
        self.sharded_state_dict: dict[str, torch.Tensor] = {}
        """The tensors of which devices hold different parts, by flat name."""
        self.unsharded_state_dict: dict[str, object] = {}
        """All other tensors and values, by flat name."""
        self.skipped: tuple[str, ...] = ()
        """Names of the state that keep their old content; known once there is a plan."""
        self.unread: tuple[str, ...] = ()
        """Names of the checkpoint that the state doesn't ask for; known once there is a plan."""
        self._target = LoadTarget({})
        self._fitted = FittedTarget(self._target, StoredState(tensors={}), self.rules)
        self._flat = FlatState(tensors={}, values={})
        self._ranks = self._owner = Ranks(rank=0, world_size=1)
        """The rank that holds tensors, and the rank whose `PerRank` values are loaded: 0 of 1 with `no_dist`."""
        self._reads = StateReads(pieces=(), values=(), skipped=(), unread=())
        self._differences = Differences()
        self._pending = PendingReads.none()

    @override
    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state, so that it can be compared with the checkpoint.

        Args:
            state_dict: the state to fill; nested dicts and lists of tensors, values and objects.
            metadata: the checkpoint's metadata.
            is_coordinator: whether this rank makes the global plan.

        Raises:
            DuplicateNameError: two entries get the same flat name.
            ValueError: `metadata` is None.
        """
        if metadata is None:
            raise ValueError("a load is planned from the checkpoint's metadata, got None")
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self.original_state_dict = state_dict
        self._target = LoadTarget(state_dict)
        self._flat = self._target.flat
        tensors = self._flat.tensors
        self.mappings = dict(self._flat.paths)
        self.sharded_state_dict = adapters.select_sharded(tensors)
        rest = {k: t for k, t in tensors.items() if k not in self.sharded_state_dict}
        self.unsharded_state_dict = {**rest, **self._flat.values}

    @override
    def create_local_plan(self) -> LoadPlan:
        """Plan to read every element of this rank's local boxes once.

        Differences between state and checkpoint don't raise here: they travel in the plan to the coordinator.

        Raises:
            UnsupportedShardingError: a tensor's placement doesn't determine which device holds what.
        """
        self._ranks = self._owner = current_ranks(self._group)
        return self._plan()

    def _plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = collect_stored_state(self.metadata)
        self._fitted = FittedTarget(self._target, stored, self.rules)
        request = build_load_request(self._fitted, self._ranks)
        rules = self._fitted.rules
        self._reads, self._differences = compare(request, stored, self._ranks, rules, self._owner)
        self.skipped, self.unread = self._reads.skipped, self._reads.unread
        found = None
        if not self._differences.is_none:
            names = self.metadata.state_dict_metadata
            found = Findings.from_differences(self._differences, names, short=not self.is_coordinator)
        if self._differences.stops_rank:
            return LoadPlan(items=[], planner_data=found)
        boxes = {layout.fqn: layout.local_boxes(self._ranks.rank) for layout in request.layouts}
        self._pending = PendingReads(
            self._reads,
            boxes=boxes,
            tensors=self._fitted.flat.tensors,
            stored_dtype_of=self._stored_dtype_of,
            lookup_shard=lambda fqn, local_index: self._lookup_shard(fqn, boxes[fqn], local_index),
        )
        return LoadPlan(items=self._pending.items, planner_data=found)

    @override
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Check all ranks' differences; return the ranks' own plans without them.

        Args:
            global_plan: the local plans, by rank.

        Raises:
            WrongRanksError: ranks have values of their own, and these are the plans of other ranks.
            LoadMismatchError: names are missing on any rank or unexpected on all, or shapes, dtypes or kinds differ
                on any rank; one report lists everything.

        Ranks: the coordinator only.
        """
        assert self.metadata is not None
        if len(global_plan) != self._ranks.world_size:
            global_plan = self._replan(global_plan)
        sent = [plan.planner_data for plan in global_plan]
        found = [each if isinstance(each, Findings) else None for each in sent]
        differences = intersect_unexpected(found, self.metadata.state_dict_metadata)
        error = judge_differences(differences)
        if error is not None:
            raise error
        return [replace(plan, planner_data=None) for plan in global_plan]

    def _replan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans where these aren't the ranks of `process_group`. Raises WrongRanksError."""
        if not self._flat.resizers:
            # Without PerRank values, the reads are the same.
            return plans
        if len(plans) == 1:
            # Loaded with no_dist: the other processes don't matter.
            self._owner = single_rank()
            return [self._plan()]
        raise WrongRanksError(
            f"this load has {len(plans)} ranks, but the planner expects {self._ranks.world_size}: pass it the group "
            "of the load, SPMDLoadPlanner(process_group=…)"
        )

    @override
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Put this rank's own read items back into its plan; finish the load if there are none.

        Raises:
            LoadMismatchError: state and checkpoint differ, and no coordinator has raised it.
        """
        if isinstance(central_plan.planner_data, Findings) and self._differences:
            # `create_global_plan` removes these data, so it wasn't called.
            raise build_mismatch_error([self._differences])
        if self._pending.is_done:
            self._finish()
        if isinstance(central_plan.items, LocalReads):
            return replace(central_plan, items=list(self._pending.items))
        return central_plan

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode a value, and keep it until all is read.

        Raises:
            ValueDecodeError: the bytes are damaged, or hold a type that isn't on the list.
        """
        name = read_item.storage_index.fqn
        if self._pending.commit_value(name, decode_value(name, value.read())):
            self._finish()

    @override
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the memory for the item's elements: part of the state's tensor, or CPU memory that is moved to it."""
        tied = self._pending.resolve_tied(read_item)
        if tied is not None:
            return tied
        tensor: torch.Tensor = self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))
        self._pending.set_destination(read_item, tensor)
        return tensor

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return this rank's shard, on the CPU. Override it to load into other memory."""
        return self._pending.local_shard(index.fqn, index.index or 0)

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> Any:
        """Return the memory for the item's elements: its part of the shard `tensor`, or scratch memory.

        Scratch memory is for elements that are converted, or divided between shards, before they go to their place.
        """
        scratch = self._pending.scratch_memory(read_item)
        if scratch is not None:
            return scratch
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return tensor[tuple(slice(start, start + length) for start, length in spans)]

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Note that the item was read. A tensor's last item fills it and frees its buffers.

        Raises:
            CastError: elements don't fit the state's dtype.
            LoadMismatchError: this was the load's last item, and the names of one tensor have different elements.
        """
        if self._pending.commit_tensor(read_item):
            self._finish()

    def _finish(self) -> None:
        self._pending.check_tied(self._fitted.flat.tensors, strict=self.rules.strict)
        values, differences = self._reads.build_values(
            self._pending.values, self._fitted, self._owner, strict=self.rules.strict
        )
        if differences:
            raise build_mismatch_error([differences], loaded="its tensors were loaded, its values were not")
        judge_differences([differences])
        finish_load(self.original_state_dict, self._fitted.filled, values)

    def _lookup_shard(self, fqn: str, boxes: Mapping[int, Box], local_index: int) -> torch.Tensor:
        return self.lookup_tensor(MetadataIndex(fqn, torch.Size(boxes[local_index].offsets), local_index))

    def _stored_dtype_of(self, name: str) -> torch.dtype:
        assert self.metadata is not None
        return self.metadata.state_dict_metadata[name].properties.dtype  # type: ignore[union-attr]  # called for tensors only
