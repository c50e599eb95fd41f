"""Place the bytes of blocks into the tensors and values of one rank."""

import ctypes
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from stepkeeper.checkpoint.blocks import Block, BlockTable, Contents
from stepkeeper.checkpoint.inventory import ChunkRecord, TensorRecord, ValueRecord
from stepkeeper.restore.ranges import Array
from stepkeeper_planners.adapters import is_ordinary
from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.loading.load_request import LoadRequest
from stepkeeper_planners.loading.read_targets import ReadTarget
from stepkeeper_planners.loading.resharding import ChunkRead, PieceRead
from stepkeeper_planners.loading.state_reads import StateReads
from stepkeeper_planners.loading.stored_state import StoredTensor

__all__ = ["Bytes", "Piece", "Place", "Places", "StoredBytes", "WholeTensors", "stored_tensor"]

Bytes = npt.NDArray[np.uint8]


def stored_tensor(tensor: TensorRecord) -> StoredTensor:
    """Convert a manifest's tensor into the planners' description of it."""
    boxes = tuple(_box(chunk.offsets, chunk.sizes) for chunk in tensor.chunks)
    return StoredTensor(
        dtype=tensor.dtype, global_shape=tensor.global_shape, boxes=boxes, data=tuple(tensor.chunks)
    )


@lru_cache(maxsize=1024)
def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box:
    """Return a box, which thousands of tensors of one shape share."""
    box = Box(offsets=offsets, sizes=sizes)
    return box if any(offsets) else Box.whole(sizes)


@dataclass(slots=True, kw_only=True)
class Piece:
    """A box of a local tensor that comes from one stored chunk."""

    path: str
    start: int
    """The place in the object at which the chunk's elements begin."""

    array: Array
    resolve: Callable[[], torch.Tensor]
    """Returns CPU memory of the box's shape and the stored dtype."""

    commit: Callable[[], bool]
    """Called once all elements are there; returns True if those of the whole tensor are."""

    n_lacking: int
    """Bytes that are still to come."""

    lock: threading.Lock
    """The lock of the tensor, which its pieces share."""

    _memory: Bytes | None = None
    _aside: torch.Tensor | None = None
    """Memory for elements that can't be written byte by byte: those of a lazily negated or conjugated tensor."""

    def copy_bytes(self, first: int, data: Bytes) -> int:
        """Copy the piece's part of these bytes into place, and return the number of bytes copied.

        Args:
            first: The place of `data` in the object.
            data: (n,) uint8.
        """
        start = max(first - self.start, 0)
        end = min(first + data.size - self.start, prod(self.array.sizes))
        if start >= end:
            return 0
        source = data[start + self.start - first : end + self.start - first]
        memory = self._place()
        # One range of bytes needs no division into boxes.
        if self.array.is_one_range and memory.flags.c_contiguous:
            span = self.array.span
            low, high = max(start, span.start), min(end, span.stop)
            if low >= high:
                return 0
            memory.reshape(-1)[low - span.start : high - span.start] = source[low - start : high - start]
            return high - low
        n_bytes = 0
        for copy in self.array.copies(start, end):
            size = prod(copy.source_shape)
            rows = source[copy.source_start : copy.source_start + size].reshape(copy.source_shape)
            cut = rows[copy.source_box]
            memory[copy.target_box] = cut
            n_bytes += cut.size
        return n_bytes

    def finish(self) -> bool:
        """Finish the piece once all its bytes have come. Returns True if those of the whole tensor have."""
        with self.lock:
            if self._aside is not None:
                self.resolve().copy_(self._aside)
            self._memory = self._aside = None
            return self.commit()

    def _place(self) -> Bytes:
        with self.lock:
            if self._memory is None:
                place = self.resolve()
                if place.is_conj() or place.is_neg():
                    place = self._aside = torch.empty(place.shape, dtype=place.dtype)
                self._memory = place.unsqueeze(-1).view(torch.uint8).numpy()
            return self._memory


@dataclass(slots=True, kw_only=True)
class StoredBytes:
    """A value's blob, or a block, while it is put together."""

    path: str
    start: int
    """The place of its first byte in the object."""

    data: Bytes
    n_lacking: int

    @classmethod
    def empty(cls, path: str, start: int, size_bytes: int) -> Self:
        """Make memory for these bytes of an object."""
        return cls(path=path, start=start, data=np.empty(size_bytes, dtype=np.uint8), n_lacking=size_bytes)

    def copy_bytes(self, first: int, data: Bytes) -> int:
        """Copy its part of these bytes into place, as `Piece.copy_bytes` does."""
        begin = self.start
        low, high = max(first, begin), min(first + data.size, begin + self.data.size)
        if low >= high:
            return 0
        self.data[low - begin : high - begin] = data[low - first : high - first]
        return high - low


@dataclass(slots=True, kw_only=True)
class WholeTensors:
    """The tensors of the state whose memory gets bytes of one object's block as they are, all at once."""

    starts: list[int] = field(default_factory=list)
    """The places of their bytes in the object."""

    ends: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    """The number of each tensor's bytes before its part."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    memory: dict[int, tuple[Bytes, int]] = field(default_factory=dict)
    """The memory of the tensors that have got bytes, and its address, by their number. While it is held, torch doesn't
    resize it, and it stays if the tensor gets another.
    """

    n_lacking: int = 0

    def add(self, tensor: torch.Tensor, first: int, last: int, block: Block) -> None:
        """Add the block's part of a contiguous CPU tensor, whose bytes are from `first` up to `last` in the object."""
        start = max(first, block.start)
        end = min(last, block.start + block.size_bytes)
        self.starts.append(start)
        self.ends.append(end)
        self.skipped.append(start - first)
        self.tensors.append(tensor)
        self.n_lacking += end - start

    def sort(self) -> None:
        """Sort the parts by their places, for `copy_bytes`. Two are disjoint, or the same bytes for two tensors."""
        order = sorted(range(len(self.starts)), key=self.starts.__getitem__)
        self.starts, self.ends, self.skipped = (
            [each[index] for index in order] for each in (self.starts, self.ends, self.skipped)
        )
        self.tensors = [self.tensors[index] for index in order]

    def copy_bytes(self, first: int, data: Bytes) -> int:
        """Copy their parts of these bytes into place, as `Piece.copy_bytes` does."""
        # The address in `data` of byte n of the object is `source` + n.
        end, source, n_bytes = first + data.size, data.ctypes.data - first, 0
        for number in range(bisect_right(self.ends, first), bisect_left(self.starts, end)):
            low, tensor = self.starts[number], self.tensors[number]
            start = max(low, first)
            length = min(self.ends[number], end) - start
            if number not in self.memory:
                self.memory[number] = _open_memory(tensor, self.skipped[number] + self.ends[number] - low)
            _, address = self.memory[number]
            ctypes.memmove(address + self.skipped[number] + start - low, source + start, length)
            n_bytes += length
        return n_bytes


def _open_memory(tensor: torch.Tensor, n_bytes: int) -> tuple[Bytes, int]:
    """Return the tensor's memory as it is now, which may not be that of the time of the plan, and its address."""
    begin = tensor.storage_offset() * tensor.itemsize
    if tensor.nbytes < n_bytes or tensor.untyped_storage().nbytes() < begin + tensor.nbytes:
        raise ValueError(
            f"a tensor's memory is too small for its {n_bytes} bytes: it was resized or released"
        )
    memory: Bytes = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memory, memory.ctypes.data


@dataclass(slots=True, kw_only=True)
class Checked:
    """Stands for a block that is read for its checksum alone, and kept nowhere."""

    n_lacking: int

    def copy_bytes(self, _first: int, data: Bytes) -> int:
        """Count these bytes."""
        return data.size


Place = Piece | StoredBytes | WholeTensors | Checked


@dataclass(slots=True, kw_only=True)
class Places:
    """The places in one rank's memory that each block's bytes go to."""

    by_block: dict[int, list[Place]] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    wholes: dict[int, WholeTensors] = field(default_factory=dict)
    """The tensors that are read whole and unchanged into their memory, by block."""

    values: dict[str, StoredBytes] = field(default_factory=dict)
    held: dict[int, StoredBytes] = field(default_factory=dict)
    """Whole blocks that are held in memory, by their numbers, since they are needed again."""

    checked: list[Checked] = field(default_factory=list)

    @property
    def all(self) -> list[Place]:
        """All places, those of one block and those of several."""
        return [
            *self.pieces,
            *self.wholes.values(),
            *self.values.values(),
            *self.held.values(),
            *self.checked,
        ]

    @classmethod
    def of(
        cls,
        contents: Contents,
        reads: StateReads,
        request: LoadRequest,
        state: Mapping[str, torch.Tensor],
        ranks: Ranks,
        *,
        shardings: Mapping[str, str] | None = None,
    ) -> Self:
        """Find the places for all that this rank reads of `contents`.

        `state` has this rank's tensors by name, and `request` their layouts. `shardings` has the shardings that
        tensors get when they are filled, by name.
        """
        places = cls()
        by_fqn: dict[str, list[PieceRead]] = {}
        for read in reads.pieces:
            by_fqn.setdefault(read.fqn, []).append(read)
        layouts = {layout.fqn: layout for layout in request.layouts}
        for fqn, mine in by_fqn.items():
            stored = contents.tensors[mine[0].stored_fqn]
            if _is_copied_whole(state[fqn], stored, mine):
                places.add_whole(state[fqn], stored.chunks[mine[0].stored_index], contents.table)
                continue
            target = ReadTarget(
                fqn=fqn,
                tensor=state[fqn],
                boxes=layouts[fqn].local_boxes(ranks.rank),
                stored_dtype=dtype_of(stored.dtype),
                n_reads=len(mine),
                sharding=(shardings or {}).get(fqn),
            )
            for piece in _pieces_of(target, stored, mine):
                places.add_piece(piece, contents.table)
        for number, wholes in places.wholes.items():
            wholes.sort()
            places.by_block.setdefault(number, []).append(wholes)
        for name in dict.fromkeys(name for read in reads.values for name in read.stored_names):
            places.add_value(contents.values[name], contents.table)
        return places

    def clear(self) -> None:
        """Forget all places, and so free the memory of values and blocks."""
        for places in (self.by_block, self.wholes, self.values, self.held):
            places.clear()
        self.pieces.clear()
        self.checked.clear()

    def add_whole(self, tensor: torch.Tensor, chunk: ChunkRecord, table: BlockTable) -> None:
        """Add a tensor to those of the blocks that hold bytes of it."""
        start = chunk.offset_bytes + chunk.data_offset_bytes
        end = start + tensor.nbytes
        for number in table.find_blocks(chunk.path, start, end - start):
            if number not in self.wholes:
                self.wholes[number] = WholeTensors()
            self.wholes[number].add(tensor, start, end, table.blocks[number])

    def add_piece(self, piece: Piece, table: BlockTable) -> None:
        """Add a piece to the blocks that hold bytes of it."""
        self.pieces.append(piece)
        span = piece.array.span
        for number in table.find_blocks(piece.path, piece.start + span.start, len(span)):
            if _holds(piece, table.blocks[number]):
                self.by_block.setdefault(number, []).append(piece)

    def add_value(self, record: ValueRecord, table: BlockTable) -> None:
        """Make memory for a value's blob, and add it to the blocks that hold bytes of it."""
        value = StoredBytes.empty(record.path, record.offset_bytes, record.length_bytes)
        self.values[record.fqn] = value
        for number in table.find_blocks(record.path, record.offset_bytes, record.length_bytes):
            self.by_block.setdefault(number, []).append(value)

    def add_checked(self, block: Block) -> None:
        """Have a block read of which nothing is kept."""
        self.checked.append(checked := Checked(n_lacking=block.size_bytes))
        self.by_block[block.number] = [checked]

    def hold_block(self, block: Block) -> None:
        """Hold all of a block too, which has bytes for a place here."""
        self.held[block.number] = held = StoredBytes.empty(block.path, block.start, block.size_bytes)
        self.by_block[block.number].append(held)


def _is_copied_whole(tensor: torch.Tensor, stored: TensorRecord, reads: Sequence[PieceRead]) -> bool:
    """Return whether the tensor's memory is to hold exactly the bytes of one stored chunk."""
    read = reads[0]
    is_one_chunk = len(reads) == 1 and (
        read.wanted_box is read.stored_box or read.wanted_box == read.stored_box
    )
    if not (is_one_chunk and is_ordinary(tensor) and tensor.is_contiguous()):
        return False
    is_alike = tensor.shape == read.wanted_box.sizes and dtype_of(stored.dtype) == tensor.dtype
    is_lazy = tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()  # noqa: SLF001  # torch has no public name
    return is_alike and not is_lazy


def _pieces_of(target: ReadTarget, stored: TensorRecord, reads: Sequence[PieceRead]) -> Iterator[Piece]:
    lock = threading.Lock()
    itemsize = target.stored_dtype.itemsize
    for read in reads:
        chunk = stored.chunks[read.stored_index]
        cut = read.wanted_box.relative_to(read.stored_box.offsets)
        array = Array(
            sizes=(*chunk.sizes, itemsize), offsets=(*cut.offsets, 0), lengths=(*cut.sizes, itemsize)
        )
        whole = ChunkRead(box=read.wanted_box, pieces=(read,))
        yield Piece(
            path=chunk.path,
            start=chunk.offset_bytes + chunk.data_offset_bytes,
            array=array,
            resolve=partial(target.resolve_memory, whole),
            commit=partial(target.commit_read, whole),
            n_lacking=array.n_bytes,
            lock=lock,
        )


def _holds(piece: Piece, block: Block) -> bool:
    """Return whether the block holds a byte that the piece wants. If that is a range of columns, few blocks may."""
    if piece.array.is_one_range:
        return True
    start = max(block.start - piece.start, 0)
    end = min(block.start + block.size_bytes - piece.start, prod(piece.array.sizes))
    return next(piece.array.copies(start, end), None) is not None
