"""Build torch's read items of one load, and track each until it is committed, with the memory that it fills."""

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import sub
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from typing_extensions import override

from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.loading.read_targets import ReadTarget
from stepkeeper_planners.loading.resharding import ChunkRead, PieceRead, group_by_chunk
from stepkeeper_planners.loading.state_reads import StateReads
from stepkeeper_planners.loading.tied_tensors import TiedCopy, build_tied_copies, check_tied_copies

__all__ = ["LocalReads", "PendingReads"]

_NOTHING = torch.Size((0,))


class LocalReads(list[ReadItem]):
    """A rank's read items. No other rank needs them, so they pickle as an empty list and are never sent."""

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return (LocalReads, ())


def _tensor_read_item(read: ChunkRead, boxes: Mapping[int, Box]) -> ReadItem:
    """Build the item for one read, named after the first local shard that it fills. `boxes` are the local shards'."""
    first = read.pieces[0]
    local = boxes[first.local_index]
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(read.fqn, torch.Size(local.offsets), first.local_index),
        dest_offsets=torch.Size(map(sub, first.wanted_box.offsets, local.offsets)),
        storage_index=MetadataIndex(
            read.stored_fqn, torch.Size(first.stored_box.offsets), first.stored_index
        ),
        storage_offsets=torch.Size(map(sub, read.box.offsets, first.stored_box.offsets)),
        lengths=torch.Size(read.box.sizes),
    )


def _value_read_item(name: str) -> ReadItem:
    """Build the item for a stored value."""
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(name),
        dest_offsets=_NOTHING,
        storage_index=MetadataIndex(name),
        storage_offsets=_NOTHING,
        lengths=_NOTHING,
    )


_ItemKey = tuple[MetadataIndex, torch.Size]
"""A read item's stored chunk, and the offsets in it."""


class PendingReads:
    """Hand out memory for each read item, and count the items that are not committed yet.

    A storage reader may call the methods from several threads.
    """

    def __init__(
        self,
        reads: StateReads,
        *,
        boxes: Mapping[str, Mapping[int, Box]],
        tensors: Mapping[str, torch.Tensor],
        stored_dtype_of: Callable[[str], torch.dtype],
        lookup_shard: Callable[[str, int], torch.Tensor],
    ) -> None:
        """Make the read items.

        Args:
            reads: this rank's reads.
            boxes: this rank's local boxes of each tensor, by local index.
            tensors: the state's tensors, by flat name.
            stored_dtype_of: returns the dtype of a tensor by its name in the checkpoint.
            lookup_shard: returns the local shard that a read fills, by flat name and local index.
        """
        self.targets: dict[str, ReadTarget] = {}
        """The tensors that are not filled yet, by flat name."""
        self.values: dict[str, object] = {}
        """The values that were read, by stored name."""
        self._chunks: dict[_ItemKey, ChunkRead] = {}
        self._tied: dict[_ItemKey, tuple[TiedCopy, PieceRead]] = {}
        """The items that are read only to compare the names of a tied tensor."""
        self._lock = threading.RLock()
        by_fqn: dict[str, list[ChunkRead]] = {}
        for read in group_by_chunk(reads.pieces):
            by_fqn.setdefault(read.fqn, []).append(read)
        for fqn, chunks in by_fqn.items():
            self.targets[fqn] = ReadTarget(
                fqn=fqn,
                tensor=tensors[fqn],
                boxes=boxes[fqn],
                stored_dtype=stored_dtype_of(chunks[0].stored_fqn),
                n_reads=len(chunks),
                lookup=partial(lookup_shard, fqn),
            )
        self.items = LocalReads(
            (
                *self._build_tensor_items(by_fqn),
                *self._build_value_items(reads),
                *self._build_tied_items(reads, boxes, stored_dtype_of),
            )
        )
        """The plan's read items."""
        self._n_open = len(self.items)

    @classmethod
    def none(cls) -> "PendingReads":
        """Return an object without reads."""
        nothing = StateReads(pieces=(), values=(), skipped=(), unread=())
        return cls(
            nothing,
            boxes={},
            tensors={},
            stored_dtype_of=lambda _: torch.uint8,
            lookup_shard=lambda *_: torch.empty(0),
        )

    @property
    def is_done(self) -> bool:
        """True if all items are committed."""
        return not self._n_open

    def resolve_tied(self, item: ReadItem) -> torch.Tensor | None:
        """Return memory for an item of `_tied`; None for all others."""
        tied = self._tied.get(_key(item))
        if tied is None:
            return None
        with self._lock:
            return tied[0].resolve_memory(tied[1])

    def set_destination(self, item: ReadItem, tensor: torch.Tensor) -> None:
        """Note that the item's elements are read into `tensor`."""
        read = self._chunks[_key(item)]
        with self._lock:
            self.targets[read.fqn].set_destination(read, tensor)

    def local_shard(self, fqn: str, local_index: int) -> torch.Tensor:
        """Return the CPU memory in which a local shard is collected."""
        with self._lock:
            return self.targets[fqn].local_shard(local_index)

    def scratch_memory(self, item: ReadItem) -> torch.Tensor | None:
        """Return memory for elements that are converted or divided after the read; None if they are read in place."""
        read = self._chunks[_key(item)]
        with self._lock:
            target = self.targets[read.fqn]
            return None if target.is_direct(read) else target.scratch_memory(read)

    def commit_tensor(self, item: ReadItem) -> bool:
        """Note that the item's elements were read, and fill the tensor with its last item.

        Return whether this was the last item of the load. Raises CastError if elements don't fit the state's dtype.
        """
        key = _key(item)
        if key not in self._tied:
            read = self._chunks[key]
            with self._lock:
                if self.targets[read.fqn].commit_read(read):
                    del self.targets[read.fqn]
        return self._close()

    def commit_value(self, name: str, value: object) -> bool:
        """Keep the value that was read. Return whether this was the last item of the load."""
        with self._lock:
            self.values[name] = value
        return self._close()

    def check_tied(self, tensors: Mapping[str, torch.Tensor], *, strict: bool) -> None:
        """Compare the names of tied tensors; see `check_tied_copies`."""
        # Several items may belong to one copy.
        copies = {id(copy): copy for copy, _ in self._tied.values()}
        check_tied_copies(copies.values(), tensors, strict=strict)
        self._tied.clear()

    def _close(self) -> bool:
        with self._lock:
            self._n_open -= 1
            return not self._n_open

    def _build_tensor_items(self, by_fqn: Mapping[str, list[ChunkRead]]) -> Iterator[ReadItem]:
        for fqn, reads in by_fqn.items():
            for read in reads:
                item = _tensor_read_item(read, self.targets[fqn].boxes)
                self._chunks[_key(item)] = read
                yield item

    def _build_value_items(self, reads: StateReads) -> Iterator[ReadItem]:
        for name in dict.fromkeys(name for value in reads.values for name in value.stored_names):
            yield _value_read_item(name)

    def _build_tied_items(
        self,
        reads: StateReads,
        boxes: Mapping[str, Mapping[int, Box]],
        stored_dtype_of: Callable[[str], torch.dtype],
    ) -> Iterator[ReadItem]:
        copies = build_tied_copies(reads.tied_copies, reads.pieces, boxes, stored_dtype_of)
        for piece in reads.tied_copies:
            item = _tensor_read_item(ChunkRead(box=piece.wanted_box, pieces=(piece,)), boxes[piece.fqn])
            self._tied[_key(item)] = copies[piece.stored_fqn], piece
            yield item


def _key(item: ReadItem) -> _ItemKey:
    return item.storage_index, item.storage_offsets
