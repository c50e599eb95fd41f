"""The plan of a save, for torch.distributed.checkpoint's `save`."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from typing_extensions import override

from stepkeeper_planners import adapters
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.process_groups import all_gather_object, broadcast_object, current_ranks, single_rank
from stepkeeper_planners.saving.assignment import Assignment, TensorWrite, assign
from stepkeeper_planners.saving.fingerprints import (
    build_ranks_differ_error,
    digest_integer_tensor,
    digest_names,
    digest_value,
    fingerprint,
)
from stepkeeper_planners.saving.global_metadata import GlobalMetadata, build_tensor_metadata
from stepkeeper_planners.saving.joining import join_layouts
from stepkeeper_planners.saving.merged_state import (
    MergedState,
    PartialState,
    StateDifference,
    compare_with_base,
    find_names_to_merge,
    merge_states,
    select_partial_state,
)
from stepkeeper_planners.saving.proposals import (
    Proposal,
    StatesDiffer,
    StatesEqual,
    check_proposals,
    group_by_fingerprint,
)
from stepkeeper_planners.saving.rules import describe_rules
from stepkeeper_planners.saving.write_data import WriteData
from stepkeeper_planners.saving.write_items import LazyItems, OwnItems, make_tensor_item, make_value_item
from stepkeeper_planners.saving.writer_limits import check_safetensors_plan, is_safetensors_plan
from stepkeeper_planners.state.nesting import encode_nesting
from stepkeeper_planners.state.per_rank import stored_name
from stepkeeper_planners.state.tree import FlatState, flatten_state
from stepkeeper_planners.state.values import encode_value, estimate_value_bytes

_COMPARED: Final = 8
"""States that are looked at by name where ranks differ: one of each kind, up to so many kinds."""


class SPMDSavePlanner(SavePlanner):
    """Writes every element of every tensor once, over all ranks and copies. Pass one to `dcp.save`; for one save each.

    Every rank finds its own share without asking; what goes to the coordinator and back is a fingerprint, and only
    where fingerprints differ are the names compared, and nothing is written. Works with torch's storage writers.
    Tied tensors are written once, and can be read under each of their names.

    Ranks are those of `process_group`, by default of all processes: give the group that `dcp.save` is given.
    """

    def __init__(self, *, process_group: dist.ProcessGroup | None = None) -> None:
        self.is_coordinator = False
        self.mappings: dict[str, tuple[str | int, ...]] = {}
        """The keys that lead to each flat name."""
        self.sharded_state_dict: dict[str, torch.Tensor] = {}
        """What lies in parts on several devices, by flat name."""
        self.unsharded_state_dict: dict[str, Any] = {}
        """All the rest, values too."""
        self._group = process_group
        self._ranks = Ranks(rank=0, world_size=1)
        self._flat = FlatState(tensors={}, values={})
        self._write_data = WriteData({}, {})
        self._digests: dict[str, bytes] = {}
        self._layouts: dict[str, TensorLayout] = {}
        self._merged = MergedState(layouts=(), value_writers={}, aliases={}, paths={})
        self._assignment = Assignment(by_rank=((),), value_writers={})
        self._metadata = GlobalMetadata({})
        self._own_values: dict[str, object] = {}
        self._blobs: dict[str, bytes] = {}

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # torch's checkpointer in a process of its own gets the planner pickled, before anything was planned.
        if self._group is not None:
            raise TypeError("a planner with a process_group can't be sent to another process")
        common = vars(SPMDSavePlanner())
        return (_rebuild_planner, (type(self), {k: v for k, v in vars(self).items() if k not in common}))

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
        # What a save before this one has found of other ranks is no more.
        self._merged = MergedState(layouts=(), value_writers={}, aliases={}, paths={})
        self._metadata = GlobalMetadata({})
        self._flat = flatten_state(state_dict)
        tensors = self._flat.tensors
        adapters.materialize(tensors)
        named = {**tensors, **{name: tensors[first] for name, first in self._flat.aliases.items()}}
        self.mappings = dict(self._flat.paths)
        self.sharded_state_dict = adapters.select_sharded(named)
        rest = {k: t for k, t in named.items() if k not in self.sharded_state_dict}
        self.unsharded_state_dict = {**rest, **self._flat.values}
        self._write_data = WriteData(tensors, adapters.deduplicate_copies(tensors))

    @override
    def create_local_plan(self) -> SavePlan:
        """What this rank writes, computed without asking the others.

        Raises:
            UnsupportedShardingError: a tensor's placement doesn't say which device holds what.
            UnsupportedValueError: a value is of a type that isn't stored.
            LayoutError: chunks overlap or leave a gap.
        """
        self._describe(current_ranks(self._group))
        if self._ranks.world_size == 1:
            self._join([self._list_incomplete()])
        return SavePlan(items=self._make_own_items(), planner_data=self._make_proposal())

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The coordinator's answer for each rank, and the metadata of the whole, both from its own state.

        Raises:
            WrongRanksError: these are not the plans of the ranks that the planner knows of.
            ReleasesDifferError: ranks would divide the same state in other ways.
            LayoutError: parts of a tensor that only the ranks together can describe don't fit together.
        """
        if len(all_plans) == 1 != self._ranks.world_size:
            # Saved with no_dist: what the other processes do is of no concern.
            self._describe(single_rank())
            proposals = [self._make_proposal()]
        else:
            proposals = check_proposals([plan.planner_data for plan in all_plans], self._ranks.world_size)
        groups, joined = (
            group_by_fingerprint(proposals),
            self._join([proposal.parts for proposal in proposals]),
        )
        if len(groups) > 1:
            differ = StatesDiffer(groups=groups, joined=joined)
            return [
                replace(plan, items=OwnItems(), planner_data=differ) for plan in all_plans
            ], self._metadata
        self._metadata = self._build_metadata()
        agreed = StatesEqual(joined=joined)
        return [
            replace(plan, items=cast("list[WriteItem]", self._make_lazy_items(rank)), planner_data=agreed)
            for rank, plan in enumerate(all_plans)
        ], self._metadata

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """This rank's plan, with its own items.

        Raises:
            RanksDifferError: what all ranks should save alike differs. On all ranks.
            LayoutError: what ranks have of a tensor doesn't make it whole. On all ranks.
            UnsupportedWriterError: the storage writer would lose something. On all ranks.
        """
        answer = new_plan.planner_data
        if isinstance(answer, StatesEqual | StatesDiffer) and not self.is_coordinator:
            self._add_joined(answer.joined)
        if isinstance(answer, StatesDiffer):
            self._merge_states(answer.groups)
        self._check_writer(new_plan.storage_data)
        if not isinstance(new_plan.items, OwnItems | LazyItems):
            return new_plan
        items = self._make_own_items()
        self._write_data.drop_copies_without_writes()
        return replace(new_plan, items=items, planner_data=None)

    @override
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The item's bytes. A tensor's shards are moved from the devices together, and let go after the last item.

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
        """What is to be written there: elements on the CPU, or a value. For subclasses to take it from elsewhere."""
        return (
            self._write_data.load_piece(index) if index in self._write_data else self._own_values[index.fqn]
        )

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 — subclasses of torch's and torch_xla's planners have this name
        """What a writer gets for it: elements as they are, a value encoded. For subclasses to change it before.

        Raises:
            UnsupportedValueError: a value is of a type that isn't stored.
        """
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        name = write_item.index.fqn
        known = self._blobs.get(name) if object is self._own_values.get(name) else None
        return io.BytesIO(encode_value(name, object) if known is None else known)

    def _describe(self, ranks: Ranks) -> None:
        """All that follows from the state alone, for these ranks."""
        self._ranks = ranks
        layouts = [adapters.describe(fqn, tensor, ranks) for fqn, tensor in self._write_data.tensors.items()]
        self._layouts = {layout.fqn: layout for layout in layouts}
        # Of a layout that isn't complete each rank has other elements.
        alike = [layout.fqn for layout in layouts if layout.complete]
        numbers = {fqn: digest_integer_tensor(self._flat.tensors[fqn]) for fqn in alike}
        self._digests = digest_names(
            layouts,
            values={fqn: digest_value(fqn, value) for fqn, value in self._flat.values.items()},
            contents={fqn: digest for fqn, digest in numbers.items() if digest is not None},
            aliases=self._flat.aliases,
            per_rank_keys=self._flat.per_rank,
        )
        own = {stored_name(name, ranks): value for name, value in self._flat.per_rank.items()}
        self._own_values = self._flat.values | own
        # What can't be stored is refused now; other values were looked at for their digests.
        self._blobs = {name: encode_value(name, value) for name, value in own.items()}
        self._assign()

    def _make_proposal(self) -> Proposal:
        return Proposal(
            rules=describe_rules(self._ranks.world_size),
            rank=self._ranks.rank,
            fingerprint=fingerprint(self._digests),
            parts=self._list_incomplete(),
        )

    def _list_incomplete(self) -> tuple[TensorLayout, ...]:
        return tuple(layout for layout in self._layouts.values() if not layout.complete)

    def _join(self, parts_by_rank: Sequence[Sequence[TensorLayout]]) -> tuple[TensorLayout, ...]:
        """The tensors that no rank knows alone are known, and who writes what of them."""
        by_name: dict[str, dict[int, TensorLayout]] = {}
        for rank, parts in enumerate(parts_by_rank):
            for part in parts:
                by_name.setdefault(part.fqn, {})[rank] = part
        joined = tuple(join_layouts(parts) for parts in by_name.values())
        self._add_joined(joined)
        return joined

    def _add_joined(self, joined: Sequence[TensorLayout]) -> None:
        if joined:
            self._layouts.update((layout.fqn, layout) for layout in joined)
            self._assign()

    def _assign(self) -> None:
        """Who writes what is found anew, of all that is known whole and that all ranks have alike."""
        elsewhere = self._merged.value_writers
        self._assignment = assign(
            [layout for layout in self._layouts.values() if layout.complete],
            self._ranks.world_size,
            value_bytes={
                n: estimate_value_bytes(v) for n, v in self._flat.values.items() if n not in elsewhere
            },
        )

    def _make_items(self, rank: int) -> tuple[list[WriteItem], tuple[TensorWrite, ...]]:
        """What this rank writes: tensors by name and place, then values."""
        writes = self._assignment.list_writes(rank)
        writers = {**self._assignment.value_writers, **self._merged.value_writers}
        names = sorted(name for name, writer in writers.items() if writer == rank)
        of_rank = Ranks(rank=rank, world_size=self._ranks.world_size)
        names += [stored_name(name, of_rank) for name in self._flat.per_rank]
        return [make_tensor_item(write) for write in writes] + [
            make_value_item(name) for name in names
        ], writes

    def _make_lazy_items(self, rank: int) -> LazyItems:
        return LazyItems(lambda: self._make_items(rank)[0])

    def _make_own_items(self) -> OwnItems:
        """This rank's items, which can be resolved from now on."""
        items, writes = self._make_items(self._ranks.rank)
        self._write_data.set_writes({item.index: write for item, write in zip(items, writes, strict=False)})
        return OwnItems(items)

    def _build_metadata(self) -> GlobalMetadata:
        flat, boxes = self._flat, self._assignment.list_boxes()
        aliases, values = flat.aliases | self._merged.aliases, [*flat.values, *self._merged.value_writers]
        stored: dict[str, Any] = {
            fqn: build_tensor_metadata(layout, boxes[fqn]) for fqn, layout in self._layouts.items()
        }
        stored.update((name, stored[first]) for name, first in aliases.items())
        of_ranks = [
            stored_name(name, Ranks(rank=rank, world_size=self._ranks.world_size))
            for name in flat.per_rank
            for rank in range(self._ranks.world_size)
        ]
        stored.update((name, BytesStorageMetadata()) for name in (*values, *of_ranks))
        paths = (
            flat.paths | self._merged.paths | encode_nesting(flat.tree) | {name: (name,) for name in of_ranks}
        )
        return GlobalMetadata(state_dict_metadata=stored, planner_data=paths, aliases=aliases)

    def _merge_states(self, groups: Sequence[tuple[int, ...]]) -> None:
        """What only some ranks have is known to all. Ranks: collective.

        Raises:
            RanksDifferError: something is not the same on all ranks that have it.
            LayoutError: the parts that ranks have of a tensor don't fit together.
        """
        me, base_ranks = self._ranks.rank, groups[0]
        base = cast(
            "Mapping[str, bytes]",
            broadcast_object(base_ranks[0], self._digests if me == base_ranks[0] else None, self._group),
        )
        own = next((ranks for ranks in groups[1:] if ranks[0] == me), None)
        mine = None if own is None else compare_with_base(own, self._digests, base, self._flat, self._layouts)
        others = [each for each in all_gather_object(mine, self._group) if isinstance(each, StateDifference)]
        names = find_names_to_merge(base, others)
        if names is None:
            compared = [(each.ranks, each.apply_to(base)) for each in others[: _COMPARED - 1]]
            n_unseen = sum(len(each.ranks) for each in others[_COMPARED - 1 :])
            raise build_ranks_differ_error([(base_ranks, base), *compared], n_unseen)
        partial = select_partial_state(names, self._flat, self._layouts) if me == base_ranks[0] else None
        shared = cast("PartialState", broadcast_object(base_ranks[0], partial, self._group))
        self._merged = merge_states(names, base_ranks, shared, others)
        self._layouts.update((layout.fqn, layout) for layout in self._merged.layouts)
        self._assign()
        if self.is_coordinator:
            # The storage writer was given this object already, and asks it what there is when all is written.
            whole = self._build_metadata()
            self._metadata.state_dict_metadata = whole.state_dict_metadata
            self._metadata.planner_data = whole.planner_data
            self._metadata.aliases = whole.aliases

    def _check_writer(self, storage_data: object) -> None:
        """Raises UnsupportedWriterError if the writer, of which this is what it added, would lose something."""
        if is_safetensors_plan(storage_data):
            self._metadata.drop_aliases()
            check_safetensors_plan(
                cast("Mapping[str, object]", storage_data),
                self._assignment,
                values=[*self._flat.values, *self._flat.per_rank],
                partial_names=self._merged.paths,
            )


def _rebuild_planner(kind: type[SPMDSavePlanner], attributes: Mapping[str, object]) -> SPMDSavePlanner:
    """A planner of this class, with what its subclass keeps."""
    planner = kind.__new__(kind)
    SPMDSavePlanner.__init__(planner)
    vars(planner).update(attributes)
    return planner
