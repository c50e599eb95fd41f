"""Plan which rank writes which part of one state, and merge the states of ranks that hold different names."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from stepkeeper_planners import adapters
from stepkeeper_planners.flat_names import make_flat_names
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.process_groups import all_gather_object, broadcast_object
from stepkeeper_planners.saving.assignment import Assignment, TensorWrite, assign
from stepkeeper_planners.saving.copies import CopyDigests, find_copies
from stepkeeper_planners.saving.differing_copies import (
    Answer,
    Groups,
    compare_copies,
    group_ranks,
    keep_first_copies,
)
from stepkeeper_planners.saving.fingerprints import (
    build_ranks_differ_error,
    digest_names,
    digest_value,
    fingerprint,
)
from stepkeeper_planners.saving.global_metadata import GlobalMetadata, build_tensor_metadata
from stepkeeper_planners.saving.merged_state import (
    MergedState,
    PartialState,
    StateDifference,
    compare_with_base,
    find_names_to_merge,
    join_layouts,
    merge_states,
    select_partial_state,
)
from stepkeeper_planners.saving.proposals import Proposal, describe_rules
from stepkeeper_planners.saving.write_items import make_tensor_item, make_value_item
from stepkeeper_planners.state.nesting import encode_nesting
from stepkeeper_planners.state.per_rank import stored_name
from stepkeeper_planners.state.tree import FlatState
from stepkeeper_planners.state.values import encode_value, estimate_value_bytes

__all__ = ["PlannedState"]

_log: Final = logging.getLogger(__name__)
_MAX_COMPARED: Final = 8
"""The largest number of states, the base among them, whose names an error compares. Equal states count once."""


class PlannedState:
    """Hold one rank's state, and its knowledge of the layouts, values and writers of all ranks."""

    def __init__(self, flat: FlatState, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
        """Describe and digest the state, and assign the writers of all that is known without the other ranks.

        `tensors` are those of `flat`, or the copies from which they are saved.

        Raises:
            UnsupportedShardingError: a tensor's placement doesn't determine which device holds what.
            UnsupportedValueError: a value is of a type that isn't stored.
            LayoutError: chunks overlap or leave a gap.
        """
        self.ranks: Final = ranks
        self.flat: Final = flat
        self._copies = CopyDigests(())
        self._first: Final[set[str]] = set()
        """The entries of the state that the first rank that holds them writes."""

        layouts = adapters.describe_all(tensors, ranks)
        self._layouts = {layout.fqn: layout for layout in layouts}
        self._digests: Final = self._digest(layouts)
        own = {stored_name(name, ranks): value for name, value in flat.per_rank.items()}
        self.own_values: Final[dict[str, object]] = flat.values | own
        """The values that this rank may write, by the names under which they are stored."""

        # A value that can't be stored is refused now. The digests have already checked the other values.
        self.blobs: Final = {name: encode_value(name, value) for name, value in own.items()}
        """The encoded `PerRank` values, by stored name."""

        self.merged = MergedState(layouts=(), value_writers={}, aliases={}, paths={})
        """The merged entries that only some ranks hold; empty before `merge`."""

        self.assignment: Assignment
        """The writers of all complete tensors, and of the values that every rank holds."""

        self._assign()

    def make_proposal(self) -> Proposal:
        """Build this rank's proposal to the coordinator."""
        return Proposal(
            rules=describe_rules(self.ranks.world_size),
            rank=self.ranks.rank,
            fingerprint=fingerprint(self._digests),
            parts=self.list_incomplete(),
            copies=self._digest_copies(),
        )

    def list_incomplete(self) -> tuple[TensorLayout, ...]:
        """Return the layouts that are incomplete: this rank knows only its own chunks of them."""
        return tuple(layout for layout in self._layouts.values() if not layout.complete)

    def join_parts(self, parts_by_rank: Sequence[Sequence[TensorLayout]]) -> tuple[TensorLayout, ...]:
        """Join the incomplete layouts of all ranks, add them and return them.

        Raises:
            LayoutError: the parts of a tensor don't fit together.
        """
        by_name: dict[str, dict[int, TensorLayout]] = {}
        for rank, parts in enumerate(parts_by_rank):
            for part in parts:
                by_name.setdefault(part.fqn, {})[rank] = part
        joined = tuple(join_layouts(parts) for parts in by_name.values())
        self.add_joined(joined)
        return joined

    def add_joined(self, joined: Sequence[TensorLayout]) -> None:
        """Replace incomplete layouts by those that the coordinator joined, and assign writers again."""
        if joined:
            self._layouts.update((layout.fqn, layout) for layout in joined)
            self._assign()

    def make_items(self) -> tuple[list[WriteItem], tuple[TensorWrite, ...]]:
        """Make this rank's write items: tensors by name and position, then values. Return the tensor writes too."""
        writes = self.assignment.list_writes(self.ranks.rank)
        writers = {**self.assignment.value_writers, **self.merged.value_writers}
        names = sorted(name for name, writer in writers.items() if writer == self.ranks.rank)
        names += self.blobs
        items = [
            make_tensor_item(write, is_sharded=len(self._layouts[write.fqn].chunks) > 1) for write in writes
        ]
        return [*items, *map(make_value_item, names)], writes

    def build_metadata(self) -> GlobalMetadata:
        """Build the metadata of the whole checkpoint: the entries of all ranks."""
        flat, boxes = self.flat, self.assignment.list_boxes()
        aliases, values = flat.aliases | self.merged.aliases, [*flat.values, *self.merged.value_writers]
        stored: dict[str, Any] = {
            fqn: build_tensor_metadata(layout, boxes[fqn]) for fqn, layout in self._layouts.items()
        }
        stored.update((name, stored[first]) for name, first in aliases.items())
        of_ranks = [
            stored_name(name, Ranks(rank=rank, world_size=self.ranks.world_size))
            for name in flat.per_rank
            for rank in range(self.ranks.world_size)
        ]
        stored.update((name, BytesStorageMetadata()) for name in (*values, *of_ranks))
        marks = encode_nesting(flat.tree, flat.paths)
        paths = flat.paths | self.merged.paths | marks | {name: (name,) for name in of_ranks}
        # The names that an optimizer's options have for each parameter, too: see flat_names.py.
        further = make_flat_names(paths, stored)
        stored.update((name, stored[of]) for name, of in further.items())
        sources = {name: aliases.get(of, of) for name, of in further.items()}
        return GlobalMetadata(state_dict_metadata=stored, planner_data=paths, aliases={**aliases, **sources})

    def merge(self, groups: Sequence[tuple[int, ...]], group: dist.ProcessGroup | None) -> None:
        """Exchange the entries that only some ranks hold, so that every rank plans the same checkpoint.

        All groups are compared with the first, the base. The first rank of each group speaks for it.

        Ranks: collective; all ranks of `group` call it with the same `groups`, the ranks of each fingerprint.

        Raises:
            RanksDifferError: an entry is not the same on all ranks that have it.
            LayoutError: the parts that ranks have of a tensor don't fit together.
        """
        me, base_ranks = self.ranks.rank, groups[0]
        base = cast(
            "Mapping[str, bytes]",
            broadcast_object(base_ranks[0], self._digests if me == base_ranks[0] else None, group),
        )
        # The group that this rank speaks for, if it isn't the base.
        own = next((ranks for ranks in groups[1:] if ranks[0] == me), None)
        mine = None if own is None else compare_with_base(own, self._digests, base, self.flat, self._layouts)
        others = [each for each in all_gather_object(mine, group) if isinstance(each, StateDifference)]
        names = find_names_to_merge(base, others)
        if names is None:
            compared = [(each.ranks, each.apply_to(base)) for each in others[: _MAX_COMPARED - 1]]
            n_unseen = sum(len(each.ranks) for each in others[_MAX_COMPARED - 1 :])
            raise build_ranks_differ_error([(base_ranks, base), *compared], n_unseen)
        partial = select_partial_state(names, self.flat, self._layouts) if me == base_ranks[0] else None
        shared = cast("PartialState", broadcast_object(base_ranks[0], partial, group))
        self.merged = merge_states(names, base_ranks, shared, others)
        self._layouts.update((layout.fqn, layout) for layout in self.merged.layouts)
        self._assign()

    def compare_copies(
        self,
        differing: Mapping[str, Groups] | None,
        parties: Sequence[Sequence[int]],
        group: dist.ProcessGroup | None,
    ) -> bool:
        """Compare the copies that ranks hold. If they differ, the first rank that holds them writes them, or none does.

        All ranks of `group` call this with the same arguments: the ranks whose digests differ, or None if the ranks
        exchange them here, and the ranks of each fingerprint. Returns whether other ranks write now than before.
        Raises RanksDifferError on all ranks for copies that differ and are none of one tensor.
        """

        def exchange(_: str, value: Mapping[str, Any], answer: Answer) -> Mapping[str, Any]:
            return answer(cast("list[Mapping[str, Any]]", all_gather_object(value, group)))

        rank, n_before = self.ranks.rank, len(self._first)
        while True:
            if differing is None:
                differing = exchange("copies", self._digest_copies(), group_ranks)
            verdict = compare_copies(differing, self._copies, self.flat, rank, exchange, parties=parties)
            if verdict is None:
                return len(self._first) > n_before
            if rank == 0:
                _log.warning("%s", verdict)
            self._first.update(verdict.first)
            self._assign()
            differing = None

    def _digest_copies(self) -> dict[str, str]:
        """Digest the copies that this rank and others hold, as far as the writers of them are known."""
        self._copies = CopyDigests(find_copies(self._list_divided(), self.ranks.rank, self.flat.tensors))
        self._copies.read(self.flat.tensors, self._copies.await_devices)
        return self._copies.combine()

    def _list_divided(self) -> list[TensorLayout]:
        """Return the layouts of the tensors that are known whole, with those copies that may be written."""
        known = [layout for layout in self._layouts.values() if layout.complete]
        return keep_first_copies(known, self._first)

    def _digest(self, layouts: Sequence[TensorLayout]) -> dict[str, bytes]:
        return digest_names(
            layouts,
            values={fqn: digest_value(fqn, value) for fqn, value in self.flat.values.items()},
            aliases=self.flat.aliases,
            per_rank_keys=self.flat.per_rank,
        )

    def _assign(self) -> None:
        """Assign writers to all complete tensors, and to all values that every rank holds."""
        elsewhere = self.merged.value_writers
        self.assignment = assign(
            self._list_divided(),
            self.ranks.world_size,
            value_bytes={
                name: estimate_value_bytes(value)
                for name, value in self.flat.values.items()
                if name not in elsewhere
            },
        )
