"""Number the blocks of a commit, identically on all ranks, and order them for reading. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Final, Self

from stepkeeper.checkpoint.dcp_format.metadata import merge_tensors, merge_values
from stepkeeper.checkpoint.inventory import ChunkRecord, TensorRecord, ValueRecord
from stepkeeper.checkpoint.manifest import BLOCK_BYTES, Manifest, ObjectRecord, Shardings

__all__ = ["Block", "BlockTable", "Contents", "Runs", "decode_runs", "encode_runs"]

Runs = list[list[int]]
"""Ascending numbers as pairs: the first of a run, and the one after its last."""

_NOT_READ: Final = (".json", ".metadata")
"""Suffixes of objects that a restore doesn't read block by block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of an object: the unit of verification."""

    number: int
    path: str
    """Path of the object, relative to the commit's folder."""

    index: int
    """Index of the block in its object."""

    size_bytes: int

    @property
    def start(self) -> int:
        """Offset of its first byte in the object."""
        return self.index * BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """The numbers of all blocks of a list of objects: object by object, each from its first byte on."""

    blocks: tuple[Block, ...]
    first_numbers: Mapping[str, int]
    one_block_each: bool = False
    """True if each object is one block, however large it is."""

    @classmethod
    def from_objects(cls, objects: Iterable[ObjectRecord]) -> Self:
        """Assign numbers to the blocks of these objects, in this order."""
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
    def from_manifests(cls, manifests: Sequence[Manifest]) -> Self:
        """Assign numbers to the blocks of the objects that hold tensors and values. All ranks get the same numbers."""
        objects = (record for manifest in manifests for record in manifest.objects)
        return cls.from_objects(record for record in objects if not record.path.endswith(_NOT_READ))

    def find_blocks(self, path: str, start: int, length: int) -> range:
        """Return the numbers of the blocks that hold these bytes of the object."""
        if not length:
            return range(0)
        first = self.first_numbers[path]
        if self.one_block_each:
            return range(first, first + 1)
        return range(first + start // BLOCK_BYTES, first + (start + length - 1) // BLOCK_BYTES + 1)

    def size_bytes(self, numbers: Iterable[int]) -> int:
        """Sum the sizes of these blocks."""
        return sum(self.blocks[number].size_bytes for number in numbers)

    def order_for_reading(self, manifests: Sequence[Manifest]) -> list[int]:
        """Order all blocks so that tensors are completed one after another, and few are partly read at any time.

        Each rank wrote its chunks in the order of the tensors, so this follows the ranks' files in parallel. Unless the
        state is on the CPU, a partly read tensor takes host memory for all of it.
        """
        chunks: dict[str, list[ChunkRecord]] = {}
        for manifest in manifests:
            for record in manifest.tensors:
                chunks.setdefault(record.fqn, []).extend(record.chunks)
        order: dict[int, None] = {}
        for of_all_ranks in zip_longest(*(manifest.tensors for manifest in manifests)):
            for tensor in filter(None, of_all_ranks):
                # The first rank that comes to a tensor brings the chunks of all ranks.
                for chunk in chunks.pop(tensor.fqn, ()):
                    start = chunk.offset_bytes + chunk.data_offset_bytes
                    n_bytes = chunk.length_bytes - chunk.data_offset_bytes
                    for number in self.find_blocks(chunk.path, start, n_bytes):
                        order[number] = None
        # The blocks that hold no tensor's elements come last.
        order.update(dict.fromkeys(range(len(self.blocks))))
        return list(order)


def encode_runs(numbers: Iterable[int]) -> Runs:
    """Encode these numbers as runs, sorted."""
    runs: Runs = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, number + 1])
    return runs


def decode_runs(runs: Runs) -> Iterator[int]:
    """Decode runs into their numbers."""
    for first, end in runs:
        yield from range(first, end)


def _merge_shardings(manifests: Sequence[Manifest]) -> Shardings:
    """Return the shardings, which only rank 0's manifest has, under all names of tensors with several names."""
    saved = next((manifest.shardings for manifest in manifests if manifest.shardings.by_name), Shardings())
    aliases = {name: of for manifest in manifests for name, of in manifest.aliases.items()}
    tied = {name: saved.by_name[of] for name, of in aliases.items() if of in saved.by_name}
    return replace(saved, by_name={**saved.by_name, **tied})


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The tensors, values and blocks of a checkpoint. They are the same on all ranks."""

    tensors: Mapping[str, TensorRecord]
    values: Mapping[str, ValueRecord]
    shardings: Shardings
    """The shardings of XLA tensors, under all their names."""

    table: BlockTable
    reading_order: Sequence[int]
    """The numbers of the blocks, in the order in which ranks read them."""

    @classmethod
    def from_manifests(cls, manifests: Sequence[Manifest]) -> Self:
        """Merge the ranks' manifests. Raises ManifestError if their parts form no complete tensors."""
        table = BlockTable.from_manifests(manifests)
        return cls(
            tensors=merge_tensors(manifests),
            values=merge_values(manifests),
            shardings=_merge_shardings(manifests),
            table=table,
            reading_order=table.order_for_reading(manifests),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors and values."""
        return (*self.tensors, *self.values)
