"""The blocks of a commit under one numbering that all ranks share, and in which order they are read. Pure."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Self

from stepkeeper.checkpoint.dcp_format.metadata import merge_tensors, merge_values
from stepkeeper.checkpoint.manifest import (
    BLOCK_BYTES,
    ChunkRecord,
    Manifest,
    ObjectRecord,
    TensorRecord,
    ValueRecord,
)

__all__ = ["Block", "BlockTable", "Contents", "Runs", "numbers_of", "runs_of"]

Runs = list[list[int]]
"""Ascending numbers, told as pairs: the first of a run, and the one behind its last."""

_NOT_READ: Final = (".json", ".metadata")
"""How the names of those objects end that a restore doesn't read block by block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    number: int
    path: str
    """Of the object, relative to the commit's folder."""

    index: int
    """In the object."""

    size_bytes: int

    @property
    def start(self) -> int:
        """Of its first byte, in the object."""
        return self.index * BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """Every block of these objects, by number: object by object, in each from the first byte on."""

    blocks: tuple[Block, ...]
    first_numbers: Mapping[str, int]

    @classmethod
    def of(cls, objects: Iterable[ObjectRecord]) -> Self:
        blocks: list[Block] = []
        first_numbers: dict[str, int] = {}
        for record in objects:
            first_numbers[record.path] = len(blocks)
            for index in range(len(record.blocks)):
                size_bytes = min(BLOCK_BYTES, record.size_bytes - index * BLOCK_BYTES)
                number = len(blocks)
                blocks.append(Block(number=number, path=record.path, index=index, size_bytes=size_bytes))
        return cls(blocks=tuple(blocks), first_numbers=first_numbers)

    @classmethod
    def of_data(cls, manifests: Sequence[Manifest]) -> Self:
        """Of the objects that hold tensors and values: all ranks number them alike."""
        objects = (record for manifest in manifests for record in manifest.objects)
        return cls.of(record for record in objects if not record.path.endswith(_NOT_READ))

    def covering(self, path: str, start: int, length: int) -> range:
        """The numbers of the blocks that hold these bytes of the object."""
        if not length:
            return range(0)
        first = self.first_numbers[path]
        return range(first + start // BLOCK_BYTES, first + (start + length - 1) // BLOCK_BYTES + 1)

    def size_bytes(self, numbers: Iterable[int]) -> int:
        return sum(self.blocks[number].size_bytes for number in numbers)

    def reading_order(self, manifests: Sequence[Manifest]) -> list[int]:
        """All numbers, so that tensors get whole one after another: few of them are half read at any time.

        That is what the writers had in mind, file by file side by side: each rank wrote its part of a tensor after
        its parts of the tensors before. Where the next tensor of one file comes late in another, it is read there
        out of its turn: what is half read is held in host memory, as a whole, where the state is on other devices.
        """
        chunks: dict[str, list[ChunkRecord]] = {}
        for manifest in manifests:
            for record in manifest.tensors:
                chunks.setdefault(record.fqn, []).extend(record.chunks)
        order: dict[int, None] = {}
        for tensors in zip_longest(*(manifest.tensors for manifest in manifests)):
            for tensor in tensors:
                for chunk in chunks.pop(tensor.fqn, ()) if tensor is not None else ():
                    order.update(dict.fromkeys(self.covering(chunk.path, *_data_of(chunk))))
        order.update(dict.fromkeys(range(len(self.blocks))))
        return list(order)


def _data_of(chunk: ChunkRecord) -> tuple[int, int]:
    """Where in the object the chunk's elements are."""
    return chunk.offset_bytes + chunk.data_offset_bytes, chunk.length_bytes - chunk.data_offset_bytes


def runs_of(numbers: Iterable[int]) -> Runs:
    """The same numbers, told shortly."""
    runs: Runs = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return runs


def numbers_of(runs: Runs) -> Iterator[int]:
    """What `runs_of` was told."""
    for first, end in runs:
        yield from range(first, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The tensors, values and blocks of a commit, from its manifests. They are the same on all ranks."""

    manifests: Sequence[Manifest]
    tensors: Mapping[str, TensorRecord]
    values: Mapping[str, ValueRecord]
    table: BlockTable
    reading_order: Sequence[int]
    """The numbers of the blocks, in the order in which ranks read them."""

    @classmethod
    def of(cls, manifests: Sequence[Manifest]) -> Self:
        """Merge the ranks' manifests. Raises ManifestError if their parts make no whole."""
        table = BlockTable.of_data(manifests)
        return cls(
            manifests=manifests,
            tensors=merge_tensors(manifests),
            values=merge_values(manifests),
            table=table,
            reading_order=table.reading_order(manifests),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors and values."""
        return (*self.tensors, *self.values)

    def in_reading_order(self, numbers: Collection[int]) -> list[int]:
        """Sort these blocks into the order in which all ranks read them."""
        return [number for number in self.reading_order if number in numbers]
