"""One state of ranks whose states have different names, or places of one tensor, as pipeline stages have. Pure.

What is compared is each group of ranks that have the same state with the largest of these groups, the base.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stepkeeper_planners.geometry.layout import TensorLayout
from stepkeeper_planners.saving.fingerprints import are_mergeable
from stepkeeper_planners.saving.joining import join_layouts, select_part
from stepkeeper_planners.state.tree import FlatState, Path

__all__ = [
    "MergedState",
    "PartialState",
    "StateDifference",
    "compare_with_base",
    "find_names_to_merge",
    "merge_states",
    "select_partial_state",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialState:
    """What a group of ranks has of some names."""

    layouts: dict[str, TensorLayout] = field(default_factory=dict)
    values: frozenset[str] = frozenset()
    aliases: dict[str, str] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """In what a group of ranks differs from the base."""

    ranks: tuple[int, ...]
    digests: dict[str, bytes]
    """Of names that the base doesn't have, or has with another digest."""

    missing: frozenset[str]
    partial: PartialState
    """What it has of the names in `digests`; of tensors, the chunks of these ranks."""

    def apply_to(self, base: Mapping[str, bytes]) -> dict[str, bytes]:
        """All digests of the group."""
        kept = {name: digest for name, digest in base.items() if name not in self.missing}
        return kept | self.digests


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedState:
    """What has to be known of the names that not all ranks have alike."""

    layouts: tuple[TensorLayout, ...]
    value_writers: dict[str, int]
    aliases: dict[str, str]
    paths: dict[str, Path]


def select_partial_state(
    names: Collection[str], flat: FlatState, layouts: Mapping[str, TensorLayout]
) -> PartialState:
    """What a state has of these names."""
    return PartialState(
        layouts={name: layouts[name] for name in names if name in layouts},
        values=frozenset(name for name in names if name in flat.values),
        aliases={name: flat.aliases[name] for name in names if name in flat.aliases},
        paths={name: flat.paths[name] for name in names if name in flat.paths},
    )


def compare_with_base(
    ranks: tuple[int, ...],
    own: Mapping[str, bytes],
    base: Mapping[str, bytes],
    flat: FlatState,
    layouts: Mapping[str, TensorLayout],
) -> StateDifference:
    """In what the state of these ranks differs from the base."""
    digests = {name: digest for name, digest in own.items() if base.get(name) != digest}
    partial = select_partial_state(digests, flat, layouts)
    parts = {name: select_part(layout, ranks) for name, layout in partial.layouts.items()}
    missing = frozenset(name for name in base if name not in own)
    return StateDifference(
        ranks=ranks, digests=digests, missing=missing, partial=replace(partial, layouts=parts)
    )


def find_names_to_merge(
    base: Mapping[str, bytes], deviations: Sequence[StateDifference]
) -> frozenset[str] | None:
    """The names in which groups differ, if all that differs is which ranks have them, and which part; else None."""
    found: dict[str, set[bytes]] = {}
    for each in deviations:
        for name in each.missing:
            found.setdefault(name, set())
        for name, digest in each.digests.items():
            found.setdefault(name, set()).add(digest)
    alike = all(are_mergeable([*digests, *([base[n]] if n in base else [])]) for n, digests in found.items())
    return frozenset(found) if alike else None


def merge_states(
    names: Collection[str],
    base_ranks: tuple[int, ...],
    base: PartialState,
    deviations: Sequence[StateDifference],
) -> MergedState:
    """Each tensor from the parts that the groups have, each value written by the first rank that has it.

    Raises:
        LayoutError: the groups don't speak of one tensor.
    """
    first = StateDifference(ranks=base_ranks, digests={}, missing=frozenset(), partial=base)
    parts: dict[str, dict[int, TensorLayout]] = {}
    writers: dict[str, int] = {}
    for each in (first, *deviations):
        for name in names:
            partial = each.partial if name in each.digests else base
            if name in each.missing:
                continue
            if name in partial.layouts:
                parts.setdefault(name, {})[each.ranks[0]] = select_part(partial.layouts[name], each.ranks)
            elif name in partial.values:
                writers[name] = min(each.ranks[0], writers.get(name, each.ranks[0]))
    return MergedState(
        layouts=tuple(join_layouts(parts[name]) for name in sorted(parts)),
        value_writers=writers,
        aliases={
            name: tensor for each in (first, *deviations) for name, tensor in each.partial.aliases.items()
        },
        paths={name: path for each in (first, *deviations) for name, path in each.partial.paths.items()},
    )
