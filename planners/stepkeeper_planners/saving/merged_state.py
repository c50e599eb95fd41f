"""Merge the states of ranks that hold different names, or different parts of a tensor, as pipeline stages do. Pure.

Ranks with equal states form a group. Each group is compared with the largest, the base. A name has a digest, a hash of
its entry. Two states are equal if their names have equal digests.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stepkeeper_planners.errors import LayoutError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, TensorLayout
from stepkeeper_planners.saving.fingerprints import are_mergeable
from stepkeeper_planners.state.nesting import encode_nesting
from stepkeeper_planners.state.tree import FlatState, Path

__all__ = [
    "MergedState",
    "PartialState",
    "StateDifference",
    "compare_with_base",
    "find_names_to_merge",
    "join_layouts",
    "merge_states",
    "select_partial_state",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialState:
    """The entries that a group of ranks holds of some names."""

    layouts: dict[str, TensorLayout] = field(default_factory=dict)
    values: frozenset[str] = frozenset()
    aliases: dict[str, str] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    """The keys that lead to each, and the marks of `encode_nesting` of the whole state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """The difference between a group of ranks and the base."""

    ranks: tuple[int, ...]
    digests: dict[str, bytes]
    """The digests of names that the base doesn't have, or has with another digest."""

    missing: frozenset[str]
    """The names that the base has and the group doesn't."""

    partial: PartialState
    """The group's entries for the names in `digests`; their layouts have the chunks of these ranks only."""

    def apply_to(self, base: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return all digests of the group, from those of the base."""
        kept = {name: digest for name, digest in base.items() if name not in self.missing}
        return kept | self.digests


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedState:
    """The entries that differ between ranks, merged."""

    layouts: tuple[TensorLayout, ...]
    value_writers: dict[str, int]
    aliases: dict[str, str]
    paths: dict[str, Path]


def select_partial_state(
    names: Collection[str], flat: FlatState, layouts: Mapping[str, TensorLayout]
) -> PartialState:
    """Return the entries that a state has of these names."""
    return PartialState(
        layouts={name: layouts[name] for name in names if name in layouts},
        values=frozenset(name for name in names if name in flat.values),
        aliases={name: flat.aliases[name] for name in names if name in flat.aliases},
        paths={name: flat.paths[name] for name in names if name in flat.paths}
        | encode_nesting(flat.tree, flat.paths),
    )


def compare_with_base(
    ranks: tuple[int, ...],
    own: Mapping[str, bytes],
    base: Mapping[str, bytes],
    flat: FlatState,
    layouts: Mapping[str, TensorLayout],
) -> StateDifference:
    """Compare the state of these ranks with the base, by their digests."""
    digests = {name: digest for name, digest in own.items() if base.get(name) != digest}
    partial = select_partial_state(digests, flat, layouts)
    parts = {name: _select_part(layout, ranks) for name, layout in partial.layouts.items()}
    missing = frozenset(name for name in base if name not in own)
    return StateDifference(
        ranks=ranks, digests=digests, missing=missing, partial=replace(partial, layouts=parts)
    )


def find_names_to_merge(
    base: Mapping[str, bytes], differences: Sequence[StateDifference]
) -> frozenset[str] | None:
    """Return the names in which groups differ; None if one differs in more than which ranks hold it, and which part."""
    found: dict[str, set[bytes]] = {}
    for each in differences:
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
    differences: Sequence[StateDifference],
) -> MergedState:
    """Join each tensor from the parts that the groups hold; let the first rank that holds a value write it.

    `names` are those in which groups differ, and `base` has the base's entries of them. Raises LayoutError if groups
    differ in a tensor's dtype or shape.
    """
    # The base doesn't differ from itself.
    of_base = StateDifference(ranks=base_ranks, digests={}, missing=frozenset(), partial=base)
    groups = (of_base, *differences)
    parts: dict[str, dict[int, TensorLayout]] = {}
    writers: dict[str, int] = {}
    for each in groups:
        for name in names:
            if name in each.missing:
                continue
            # A group sends only the entries in which it differs from the base.
            partial = each.partial if name in each.digests else base
            if name in partial.layouts:
                parts.setdefault(name, {})[each.ranks[0]] = _select_part(partial.layouts[name], each.ranks)
            elif name in partial.values:
                writers[name] = min(each.ranks[0], writers.get(name, each.ranks[0]))
    return MergedState(
        layouts=tuple(join_layouts(parts[name]) for name in sorted(parts)),
        value_writers=writers,
        aliases={name: tensor for each in groups for name, tensor in each.partial.aliases.items()},
        paths={name: path for each in groups for name, path in each.partial.paths.items()},
    )


def _select_part(layout: TensorLayout, ranks: Collection[int]) -> TensorLayout:
    """Return the layout with only the chunks and owners of these ranks, as an incomplete one."""
    among = frozenset(ranks)
    # The tuple of chunks is kept if it is of these ranks only: many tensors share it.
    if all(owner.rank in among for chunk in layout.chunks for owner in chunk.owners):
        return layout._replace(complete=False)
    chunks = []
    for chunk in layout.chunks:
        own = tuple(owner for owner in chunk.owners if owner.rank in among)
        if own:
            chunks.append(Chunk(box=chunk.box, owners=own))
    return layout._replace(chunks=tuple(chunks), complete=False)


def join_layouts(parts: Mapping[int, TensorLayout]) -> TensorLayout:
    """Join the parts of one tensor's layout. Equal boxes on different ranks are copies of one chunk.

    `parts` are by rank, or by the first of several ranks that hold a part together. Raises LayoutError if they differ
    in dtype or shape. The result is not checked for gaps and overlaps: `check_cover` does that.
    """
    ranks = sorted(parts)
    first = parts[ranks[0]]
    owners: dict[Box, list[Owner]] = {}
    for rank in ranks:
        part = parts[rank]
        for attribute in ("dtype", "global_shape"):
            expected, found = getattr(first, attribute), getattr(part, attribute)
            if found != expected:
                raise LayoutError(
                    f"{first.fqn}: its {attribute} is {expected} on rank {ranks[0]}, {found} on rank {rank}"
                )
        for chunk in part.chunks:
            owners.setdefault(chunk.box, []).extend(chunk.owners)
    chunks = tuple(Chunk(box=box, owners=tuple(sorted(owners[box]))) for box in sorted(owners))
    return first._replace(chunks=chunks, complete=True)
