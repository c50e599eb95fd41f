"""Load one step of another writer into the state of one rank. Each rank reads the chunks that it needs, whole."""

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Final

import torch

from stepkeeper.coordination.rank_group import RankGroup, SoloRankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.restore.fit import check_refilled, tell_findings
from stepkeeper.restore.foreign.content import ForeignContent, open_content
from stepkeeper.restore.foreign.read_ahead import read_ahead
from stepkeeper.restore.progress import RestoreProgress
from stepkeeper.storage import Store
from stepkeeper_planners import adapters
from stepkeeper_planners.dtypes import cast_elements, dtype_of, itemsize_bytes
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks, TensorLayout
from stepkeeper_planners.loading.load_request import LoadRequest, LoadTarget, build_load_request
from stepkeeper_planners.loading.matching import compare
from stepkeeper_planners.loading.resharding import PieceRead
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.loading.state_reads import StateReads
from stepkeeper_planners.loading.stored_state import StoredState
from stepkeeper_planners.loading.tied_tensors import build_tied_copies, check_tied_copies
from stepkeeper_planners.state.filling import finish_load
from stepkeeper_planners.state.tree import FlatState

__all__ = ["COPIES", "ForeignLoading"]

COPIES: Final = 3
"""The copies of a chunk in memory while it is read: from the store, out of its archive, as a tensor."""

Shards = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """One tensor of this rank."""

    layout: TensorLayout
    boxes: Mapping[int, Box]
    pieces: tuple[PieceRead, ...]
    size_bytes: int
    """The host memory that it takes while it is read."""

    @property
    def filled_bytes(self) -> int:
        """Number of bytes of the local shards."""
        return sum(prod(box.sizes) for box in self.boxes.values()) * itemsize_bytes(self.layout.dtype)


class ForeignLoading:
    """Load one step of another writer into one rank's state.

    Call `compare_state` first; once all ranks have, `read_values`; once all ranks have, `fill_tensors`; once all ranks
    have, `scatter_values`.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        target: LoadTarget,
        ranks: Ranks,
        *,
        rules: LoadRules | None = None,
        half_filled: Collection[str] = (),
        waits: Waits | None = None,
        rank_group: RankGroup | None = None,
    ) -> None:
        """Prepare to load the step in `folder` into the target's state.

        Args:
            store: The root.
            folder: The step's folder, relative to the root.
            target: This rank's state.
            ranks: This rank and its world.
            rules: Which parts to load, and how strictly; by default all of it.
            half_filled: Names of tensors that hold parts of another checkpoint, and must be filled by this
                one.
            waits: Ends the waits for the store.
            rank_group: The ranks that load it together; None: this one alone.

        """
        self._waits = waits or Waits()
        self._rank_group = rank_group or SoloRankGroup()
        self._began_s = time.monotonic()
        self._half_filled = half_filled
        self._store, self._folder, self._target, self._ranks = store, folder, target, ranks
        self._rules = rules
        self._flat = FlatState(tensors={}, values={})
        self._request = LoadRequest(layouts=())
        self._reads = StateReads(pieces=(), values=(), skipped=(), unread=())
        self._content: ForeignContent | None = None
        self._loaded: Mapping[str, object] = {}

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the tensors and values in the step; known after `compare_state`."""
        return () if self._content is None else (*self._content.tensors, *self._content.values)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors in the state that are filled; known after `compare_state`."""
        return frozenset(piece.fqn for piece in self._reads.pieces)

    def compare_state(self) -> dict[str, Any]:
        """Compare the state with the step, and find out what to read. Nothing in the state is changed.

        Returns:
            This rank's report to the others: where its state doesn't fit.

        Raises:
            TornCheckpointError: `.metadata` is missing, damaged, or contradicts itself.
            UnsupportedShardingError: A tensor's placement doesn't say which device holds what.
            RestoreError: Something that is to be loaded is of a kind that isn't read.
            StorageError: The store gave no answer, or refused.

        """
        self._content = content = self._waits.run(partial(open_content, self._store, self._folder))
        self._flat = self._target.flat
        self._request = build_load_request(self._target, self._ranks)
        stored = StoredState(
            tensors=self._content.tensors,
            values=self._content.values,
            read_paths=lambda: content.key_paths,
        )
        self._reads, differences = compare(self._request, stored, self._ranks, self._rules)
        check_refilled(self._half_filled, self.names)
        pieces = dict.fromkeys((piece.stored_fqn, piece.stored_index) for piece in self._reads.pieces)
        names = dict.fromkeys(name for read in self._reads.values for name in read.stored_names)
        self._waits.run(partial(content.check_kinds, pieces, names))
        return tell_findings(differences, self.stored_names, rank=self._ranks.rank)

    def read_values(self) -> dict[str, Any]:
        """Read this rank's values. Nothing in the state is changed: what they show not to fit is refused in time.

        Returns:
            This rank's report to the others: where its state doesn't fit.

        Raises:
            TornCheckpointError: Bytes of the step are bad.
            ValueDecodeError: A value is of a type that isn't read.
            PerRankError: The values of other ranks can't be converted.
            StorageError: The store gave no answer, or refused.

        """
        assert self._content is not None
        content = self._content
        names = dict.fromkeys(name for read in self._reads.values for name in read.stored_names)
        read = self._waits.run(lambda: {name: content.read_value(name) for name in names})
        strict = self._rules is None or self._rules.strict
        self._loaded, differences = self._reads.build_values(read, self._target, self._ranks, strict=strict)
        return tell_findings(differences, self.stored_names, rank=self._ranks.rank)

    def fill_tensors(self) -> dict[str, Any]:
        """Read this rank's tensors and fill them in place.

        Raises:
            TornCheckpointError: Bytes of the step are bad. The tensors are part old, part new then.
            LoadMismatchError: Tensors that are one in the state have different elements in the step.
            CastError: Elements don't fit the state's dtype.
            RestoreError: A tensor is of a kind that isn't read.
            StorageError: The store gave no answer, or refused.

        """
        assert self._content is not None
        content, tensors = self._content, self._flat.tensors
        loads = list(self._loads())
        done_bytes = 0
        with self._rank_group.heartbeat() as note_moved:
            progress = RestoreProgress(
                f"step folder {self._folder}",
                sum(load.filled_bytes for load in loads),
                note_moved=note_moved,
                began_s=self._began_s,
            )

            def fill(load: _Load, shards: Shards) -> None:
                nonlocal done_bytes
                adapters.fill(tensors[load.layout.fqn], shards)
                done_bytes += load.filled_bytes
                progress.note_bytes(done_bytes)

            read_ahead(iter(loads), lambda load: _read_shards(content, load), fill, waits=self._waits)
        self._waits.run(partial(self._check_tied_copies, content))
        return {}

    def _check_tied_copies(self, content: ForeignContent) -> None:
        reads = self._reads
        boxes = {layout.fqn: layout.local_boxes(self._ranks.rank) for layout in self._request.layouts}
        copies = build_tied_copies(
            reads.tied_copies, reads.pieces, boxes, lambda name: dtype_of(content.tensors[name].dtype)
        )
        for piece in reads.tied_copies:
            part = piece.wanted_box.relative_to(piece.stored_box.offsets)
            chunk = content.read_chunk(piece.stored_fqn, piece.stored_index)
            copies[piece.stored_fqn].resolve_memory(piece).copy_(chunk[part.slices])
        strict = self._rules is None or self._rules.strict
        check_tied_copies(copies.values(), self._flat.tensors, strict=strict)

    def scatter_values(self) -> dict[str, Any]:
        """Set the values in the state, and call load_state_dict() of every Stateful with its part."""
        finish_load(self._target.state, self._flat, self._loaded)
        return {}

    def _loads(self) -> Iterator[_Load]:
        by_fqn: dict[str, list[PieceRead]] = {}
        for piece in self._reads.pieces:
            by_fqn.setdefault(piece.fqn, []).append(piece)
        for layout in self._request.layouts:
            if pieces := by_fqn.get(layout.fqn):
                boxes = layout.local_boxes(self._ranks.rank)
                yield _Load(
                    layout=layout,
                    boxes=boxes,
                    pieces=tuple(pieces),
                    size_bytes=self._size_bytes(layout, boxes, pieces),
                )

    def _size_bytes(self, layout: TensorLayout, boxes: Mapping[int, Box], pieces: list[PieceRead]) -> int:
        """Compute the host memory of its shards and of the largest chunk that is read for them."""
        assert self._content is not None
        stored = self._content.tensors[pieces[0].stored_fqn]
        n_local = sum(prod(box.sizes) for box in boxes.values())
        n_largest = max(prod(piece.stored_box.sizes) for piece in pieces)
        return n_local * itemsize_bytes(layout.dtype) + COPIES * n_largest * itemsize_bytes(stored.dtype)


def _read_shards(content: ForeignContent, load: _Load) -> Shards:
    """Read each chunk once, however many of the local shards have a part of it."""
    dtype = dtype_of(load.layout.dtype)
    shards = {index: torch.empty(box.sizes, dtype=dtype) for index, box in load.boxes.items()}
    by_chunk: dict[int, list[PieceRead]] = {}
    for piece in load.pieces:
        by_chunk.setdefault(piece.stored_index, []).append(piece)
    for number, pieces in by_chunk.items():
        chunk = content.read_chunk(pieces[0].stored_fqn, number)
        for piece in pieces:
            wanted = piece.wanted_box
            target = shards[piece.local_index][
                wanted.relative_to(load.boxes[piece.local_index].offsets).slices
            ]
            part = chunk[wanted.relative_to(piece.stored_box.offsets).slices]
            target.copy_(cast_elements(load.layout.fqn, part, dtype))
    return shards
