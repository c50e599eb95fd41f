"""What a commit holds, from its manifests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from stepkeeper.dcp.metadata import merge_tensors, merge_values
from stepkeeper.manifest import Manifest, TensorRecord, ValueRecord
from stepkeeper.restore.blocks import BlockTable

__all__ = ["Contents"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The same on all ranks."""

    manifests: Sequence[Manifest]
    tensors: Mapping[str, TensorRecord]
    values: Mapping[str, ValueRecord]
    table: BlockTable

    @classmethod
    def of(cls, manifests: Sequence[Manifest]) -> Self:
        """Raises ManifestError if the ranks' parts make no whole."""
        return cls(
            manifests=manifests,
            tensors=merge_tensors(manifests),
            values=merge_values(manifests),
            table=BlockTable.of_data(manifests),
        )

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.tensors, *self.values)

    def in_reading_order(self, numbers: Mapping[int, object]) -> list[int]:
        """Those of the blocks, as all ranks read them one after another."""
        return [number for number in self.table.reading_order(self.manifests) if number in numbers]
