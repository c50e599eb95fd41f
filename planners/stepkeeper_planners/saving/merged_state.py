"""One state of ranks whose states have different names, or places of one tensor, as pipeline stages have. Pure.

What is compared is each group of ranks that have the same state with the largest of these groups, the base.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stepkeeper_planners.geometry.layout import TensorLayout
from stepkeeper_planners.saving.fingerprints import can_be_one
from stepkeeper_planners.saving.joining import join_layouts, part_of
from stepkeeper_planners.state.tree import FlatState, Path

__all__ = ["Deviation", "Holding", "United", "deviation", "holding", "names_to_unite", "unite"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a group of ranks has of some names."""

    layouts: dict[str, TensorLayout] = field(default_factory=dict)
    values: frozenset[str] = frozenset()
    aliases: dict[str, str] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """In what a group of ranks differs from the base."""

    ranks: tuple[int, ...]
    digests: dict[str, bytes]
    """Of names that the base doesn't have, or has with another digest."""

    missing: frozenset[str]
    held: Holding
    """What it has of the names in `digests`; of tensors, the chunks of these ranks."""

    def applied_to(self, base: Mapping[str, bytes]) -> dict[str, bytes]:
        """All digests of the group."""
        kept = {name: digest for name, digest in base.items() if name not in self.missing}
        return kept | self.digests


@dataclass(frozen=True, slots=True, kw_only=True)
class United:
    """What has to be known of the names that not all ranks have alike."""

    layouts: tuple[TensorLayout, ...]
    value_writers: dict[str, int]
    aliases: dict[str, str]
    paths: dict[str, Path]


def holding(names: Collection[str], flat: FlatState, layouts: Mapping[str, TensorLayout]) -> Holding:
    """What a state has of these names."""
    return Holding(
        layouts={name: layouts[name] for name in names if name in layouts},
        values=frozenset(name for name in names if name in flat.values),
        aliases={name: flat.aliases[name] for name in names if name in flat.aliases},
        paths={name: flat.paths[name] for name in names if name in flat.paths},
    )


def deviation(
    ranks: tuple[int, ...],
    own: Mapping[str, bytes],
    base: Mapping[str, bytes],
    flat: FlatState,
    layouts: Mapping[str, TensorLayout],
) -> Deviation:
    """In what the state of these ranks differs from the base."""
    digests = {name: digest for name, digest in own.items() if base.get(name) != digest}
    held = holding(digests, flat, layouts)
    parts = {name: part_of(layout, ranks) for name, layout in held.layouts.items()}
    missing = frozenset(name for name in base if name not in own)
    return Deviation(ranks=ranks, digests=digests, missing=missing, held=replace(held, layouts=parts))


def names_to_unite(base: Mapping[str, bytes], deviations: Sequence[Deviation]) -> frozenset[str] | None:
    """The names in which groups differ, if all that differs is which ranks have them, and which part; else None."""
    found: dict[str, set[bytes]] = {}
    for each in deviations:
        for name in each.missing:
            found.setdefault(name, set())
        for name, digest in each.digests.items():
            found.setdefault(name, set()).add(digest)
    alike = all(can_be_one([*digests, *([base[n]] if n in base else [])]) for n, digests in found.items())
    return frozenset(found) if alike else None


def unite(
    names: Collection[str], base_ranks: tuple[int, ...], base: Holding, deviations: Sequence[Deviation]
) -> United:
    """Each tensor from the parts that the groups have, each value written by the first rank that has it.

    Raises:
        LayoutError: the groups don't speak of one tensor.
    """
    first = Deviation(ranks=base_ranks, digests={}, missing=frozenset(), held=base)
    parts: dict[str, dict[int, TensorLayout]] = {}
    writers: dict[str, int] = {}
    for each in (first, *deviations):
        for name in names:
            held = each.held if name in each.digests else base
            if name in each.missing:
                continue
            if name in held.layouts:
                parts.setdefault(name, {})[each.ranks[0]] = part_of(held.layouts[name], each.ranks)
            elif name in held.values:
                writers[name] = min(each.ranks[0], writers.get(name, each.ranks[0]))
    return United(
        layouts=tuple(join_layouts(parts[name]) for name in sorted(parts)),
        value_writers=writers,
        aliases={name: tensor for each in (first, *deviations) for name, tensor in each.held.aliases.items()},
        paths={name: path for each in (first, *deviations) for name, path in each.held.paths.items()},
    )
