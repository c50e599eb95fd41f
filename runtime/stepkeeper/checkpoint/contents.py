"""What a commit holds, from its manifests."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from stepkeeper.checkpoint.blocks import BlockTable
from stepkeeper.checkpoint.dcp_format.metadata import merge_tensors, merge_values
from stepkeeper.checkpoint.manifest import Manifest, TensorRecord, ValueRecord

__all__ = ["Contents"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The same on all ranks."""

    manifests: Sequence[Manifest]
    tensors: Mapping[str, TensorRecord]
    values: Mapping[str, ValueRecord]
    table: BlockTable
    reading_order: Sequence[int]
    """Of the blocks."""

    @classmethod
    def of(cls, manifests: Sequence[Manifest]) -> Self:
        """Raises ManifestError if the ranks' parts make no whole."""
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
        return (*self.tensors, *self.values)

    def in_reading_order(self, numbers: Collection[int]) -> list[int]:
        """These blocks, as all ranks read them one after another."""
        return [number for number in self.reading_order if number in numbers]
