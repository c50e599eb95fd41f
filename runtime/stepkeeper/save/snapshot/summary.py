"""Sum up a snapshot, so that the ranks can compare what must be the same on all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stepkeeper_planners.geometry.layout import TensorLayout
from stepkeeper_planners.saving.fingerprints import digest_names

__all__ = ["StateSummary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSummary:
    """The parts of a state that must be the same on all ranks, as they were when the snapshot was taken."""

    layouts: Sequence[TensorLayout] = ()
    layout_digests: Callable[[], Mapping[str, bytes]] | None = None
    """Returns digests of the layouts, where these are kept from save to save."""

    values: Mapping[str, bytes] = field(default_factory=dict)
    """Digests of the values."""

    contents: Mapping[str, bytes] = field(default_factory=dict)
    """Digests of the tensors that are compared by content."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    per_rank: Sequence[str] = ()

    def compute_digests(self) -> dict[str, bytes]:
        """Compute one digest for each name."""
        return digest_names(
            self.layouts,
            layout_digests=None if self.layout_digests is None else self.layout_digests(),
            values=self.values,
            contents=self.contents,
            aliases=self.aliases,
            per_rank_keys=self.per_rank,
        )
