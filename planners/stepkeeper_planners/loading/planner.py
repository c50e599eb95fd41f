"""The plan of a load, for torch.distributed.checkpoint's `load`."""

import io
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
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
)
from stepkeeper_planners.loading.load_request import build_load_request
from stepkeeper_planners.loading.matching import StateReads, compare
from stepkeeper_planners.loading.read_items import LocalReads, tensor_read_item, value_read_item
from stepkeeper_planners.loading.read_targets import ReadTarget
from stepkeeper_planners.loading.resharding import ChunkRead, PieceRead, group_by_chunk
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.loading.stored_state import collect_stored_state
from stepkeeper_planners.loading.tied_tensors import TiedCopy, build_tied_copies, check_tied_copies
from stepkeeper_planners.process_groups import current_ranks, single_rank
from stepkeeper_planners.state.tree import FlatState, gather_state, scatter_state
from stepkeeper_planners.state.values import decode_value


class SPMDLoadPlanner(LoadPlanner):
    """Reads into the state's own tensors, whatever layout was saved. Pass one to `dcp.load`; for one load each.

    The state is where it belongs already: tensors on their devices, with their shardings.

    Names, shapes, dtypes and kinds of state and checkpoint have to agree; where they don't, one error on all ranks
    lists everything, and nothing was loaded. Fewer are compared with `items` and `exclude`, patterns of flat names
    of which "model" also means all of "model.…". `strict=False` loads what both have and leaves the rest: then
    `skipped` has the names that the state kept, `unread` those that the checkpoint has beyond. `cast=True` converts
    dtypes as `torch.can_cast` allows.

    Tensors are filled as their bytes arrive, values and objects with load_state_dict() after the last byte. So if
    reading itself fails, tensors are part old, part new, all else is as it was: load again, or don't use the state.
    Host memory: CPU tensors are read in place; others are collected until all of their parts on this rank are in.
    torch's FileSystemReader reads file by file, so that is this rank's part of all tensors that lie in several files.

    Ranks are those of `process_group`, by default of all processes: give the group that `dcp.load` is given. With
    `no_dist` a process's `PerRank` is that of one rank of one, as a save with `no_dist` has it.
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
        """Raises PatternError if `items` or `exclude` is one string."""
        self.rules = LoadRules(strict=strict, items=items, exclude=exclude, cast=cast)
        self._group = process_group
        self._alone = False
        self.is_coordinator = False
        self.metadata: Metadata | None = None
        self.original_state_dict: dict[str, Any] = {}
        self.mappings: dict[str, tuple[str | int, ...]] = {}
        """The keys that lead to each flat name."""
        self.sharded_state_dict: dict[str, torch.Tensor] = {}
        """What lies in parts on several devices, by flat name."""
        self.unsharded_state_dict: dict[str, object] = {}
        """All the rest, values too."""
        self.skipped: tuple[str, ...] = ()
        """Names of the state that keep what they have; known once there is a plan."""
        self.unread: tuple[str, ...] = ()
        """Names of the checkpoint that the state doesn't ask for; known once there is a plan."""
        self._flat = FlatState(tensors={}, values={})
        self._ranks = Ranks(rank=0, world_size=1)
        self._reads = StateReads(pieces=(), values=(), skipped=(), unread=())
        self._differences = Differences()
        self._items = LocalReads()
        self._chunks: dict[tuple[MetadataIndex, torch.Size], ChunkRead] = {}
        self._targets: dict[str, ReadTarget] = {}
        self._tied_reads: dict[tuple[MetadataIndex, torch.Size], tuple[TiedCopy, PieceRead]] = {}
        self._n_open = 0
        self._values: dict[str, object] = {}
        self._lock = threading.RLock()

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
        self.mappings = dict(self._flat.paths)
        self.sharded_state_dict = adapters.select_sharded(tensors)
        rest = {k: t for k, t in tensors.items() if k not in self.sharded_state_dict}
        self.unsharded_state_dict = {**rest, **self._flat.values}

    @override
    def create_local_plan(self) -> LoadPlan:
        """What this rank reads: every element of its local boxes once. Differences are in the plan, raised later.

        Raises:
            UnsupportedShardingError: a tensor's placement doesn't say which device holds what.
        """
        assert self.metadata is not None
        self._ranks = current_ranks(self._group)
        return self._plan()

    def _plan(self) -> LoadPlan:
        assert self.metadata is not None
        request, stored = build_load_request(self._flat, self._ranks), collect_stored_state(self.metadata)
        self._reads, self._differences = compare(request, stored, self._ranks, self.rules, self._owner)
        self.skipped, self.unread = self._reads.skipped, self._reads.unread
        found = None
        if self._differences:
            names = self.metadata.state_dict_metadata
            found = Findings.from_differences(self._differences, names, short=not self.is_coordinator)
        if self._differences.missing or self._differences.mismatched:
            return LoadPlan(items=[], planner_data=found)
        boxes = {layout.fqn: layout.local_boxes(self._ranks.rank) for layout in request.layouts}
        by_fqn: dict[str, list[ChunkRead]] = {}
        for read in group_by_chunk(self._reads.pieces):
            by_fqn.setdefault(read.fqn, []).append(read)
        self._targets = {
            fqn: ReadTarget(
                fqn=fqn,
                tensor=self._flat.tensors[fqn],
                boxes=boxes[fqn],
                stored_dtype=self.metadata.state_dict_metadata[reads[0].stored_fqn].properties.dtype,  # type: ignore[union-attr]  # pieces are tensors'
                n_reads=len(reads),
                lookup=partial(self._lookup_shard, fqn, boxes[fqn]),
            )
            for fqn, reads in by_fqn.items()
        }
        self._items = LocalReads((*self._read_items(by_fqn), *self._tied_read_items(boxes)))
        self._n_open = len(self._items)
        return LoadPlan(items=self._items, planner_data=found)

    @override
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The ranks' own plans, without what the ranks had to say.

        Raises:
            WrongRanksError: ranks have values of their own, and these are the plans of other ranks.
            LoadMismatchError: names are missing on any rank or unexpected on all, or shapes, dtypes or kinds differ,
                on any rank; all in one report.
        """
        assert self.metadata is not None
        if len(global_plan) != self._ranks.world_size:
            global_plan = self._replan(global_plan)
        said = [plan.planner_data for plan in global_plan]
        found = [each if isinstance(each, Findings) else None for each in said]
        differences = intersect_unexpected(found, self.metadata.state_dict_metadata)
        if any(differences):
            raise build_mismatch_error(differences)
        return [replace(plan, planner_data=None) for plan in global_plan]

    def _replan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans, where they aren't of the ranks that this planner took part with.

        Raises:
            WrongRanksError: what each rank has of its own can't be found so.
        """
        if not self._flat.resizers:
            return plans
        if len(plans) == 1:
            # Loaded with no_dist: what the other processes do is of no concern.
            self._alone = True
            return [self._plan()]
        raise WrongRanksError(
            f"this load is of {len(plans)} ranks, the planner knows of {self._ranks.world_size}: give it the group "
            "that the load is given, SPMDLoadPlanner(process_group=…)"
        )

    @property
    def _owner(self) -> Ranks:
        """Who this process is among those that have a value each."""
        return single_rank() if self._alone else self._ranks

    @override
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan with what this rank reads; where that is nothing the load is complete.

        Raises:
            LoadMismatchError: state and checkpoint differ, and there was no global plan to say so.
        """
        if isinstance(central_plan.planner_data, Findings):
            raise build_mismatch_error([self._differences])
        if not self._n_open:
            self._finish()
        if isinstance(central_plan.items, LocalReads):
            return replace(central_plan, items=list(self._items))
        return central_plan

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """The value is kept until all is read.

        Raises:
            ValueDecodeError: damaged bytes, or a type that isn't on the list.
        """
        name = read_item.storage_index.fqn
        decoded = decode_value(name, value.read())
        with self._lock:
            self._values[name] = decoded
        self._close_read()

    @override
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where the item's elements go: part of the tensor itself, or CPU memory that is moved to it."""
        tied = self._tied_reads.get(_place_of(read_item))
        if tied is not None:
            with self._lock:
                return tied[0].resolve_memory(tied[1])
        tensor: torch.Tensor = self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))
        read = self._chunks[_place_of(read_item)]
        with self._lock:
            self._targets[read.fqn].set_destination(read, tensor)
        return tensor

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """This rank's shard on the CPU, that is being loaded. For subclasses to load into something else."""
        with self._lock:
            return self._targets[index.fqn].local_shard(index.index or 0)

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> Any:
        """Memory for the item's elements: its part of the shard, or where they are converted or divided first."""
        read = self._chunks[_place_of(read_item)]
        with self._lock:
            target = self._targets[read.fqn]
            if not target.is_direct(read):
                return target.scratch_memory(read)
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return tensor[tuple(slice(start, start + length) for start, length in spans)]

    def _lookup_shard(self, fqn: str, boxes: Mapping[int, Box], local_index: int) -> torch.Tensor:
        return self.lookup_tensor(MetadataIndex(fqn, torch.Size(boxes[local_index].offsets), local_index))

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The item's elements are in; after a tensor's last one it is filled and its buffers let go.

        Raises:
            CastError: elements don't fit the state's dtype.
            LoadMismatchError: this was the last item, and names of one tensor have different elements.
        """
        place = _place_of(read_item)
        if place not in self._tied_reads:
            read = self._chunks[place]
            with self._lock:
                if self._targets[read.fqn].commit_read(read):
                    del self._targets[read.fqn]
        self._close_read()

    def _close_read(self) -> None:
        with self._lock:
            self._n_open -= 1
            last = not self._n_open
        if last:
            self._finish()

    def _finish(self) -> None:
        copies = {id(copy): copy for copy, _ in self._tied_reads.values()}
        check_tied_copies(copies.values(), self._flat.tensors, strict=self.rules.strict)
        self._tied_reads.clear()
        values = {
            read.fqn: read.build_value(self._values, self._flat.resizers.get(read.fqn), self._owner)
            for read in self._reads.values
        }
        scatter_state(self.original_state_dict, self._flat, values)
        adapters.materialize(self._flat.tensors)

    def _read_items(self, by_fqn: Mapping[str, list[ChunkRead]]) -> Iterator[ReadItem]:
        for fqn, reads in by_fqn.items():
            for read in reads:
                item = tensor_read_item(read, self._targets[fqn].boxes)
                self._chunks[_place_of(item)] = read
                yield item
        for name in dict.fromkeys(name for value in self._reads.values for name in value.stored_names):
            yield value_read_item(name)

    def _tied_read_items(self, boxes: Mapping[str, Mapping[int, Box]]) -> Iterator[ReadItem]:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata

        def stored_dtype_of(name: str) -> torch.dtype:
            return stored[name].properties.dtype  # type: ignore[union-attr]  # pieces are tensors'

        copies = build_tied_copies(self._reads.tied_copies, self._reads.pieces, boxes, stored_dtype_of)
        for piece in self._reads.tied_copies:
            item = tensor_read_item(ChunkRead(box=piece.wanted_box, pieces=(piece,)), boxes[piece.fqn])
            self._tied_reads[_place_of(item)] = copies[piece.stored_fqn], piece
            yield item


def _place_of(read_item: ReadItem) -> tuple[MetadataIndex, torch.Size]:
    return read_item.storage_index, read_item.storage_offsets
