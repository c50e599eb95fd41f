"""Recognize a state's structure, so that what depends on the structure alone is derived once.

A state may have tens of thousands of tensors, and training waits while they are collected. So each tensor takes part in
a few passes in C here, not in a few lines of Python.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import torch

from stepkeeper_planners import adapters
from stepkeeper_planners.state.named_optimizer import NamedState
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.scalars import PLAIN_LEAVES
from stepkeeper_planners.state.tree import (
    FlatState,
    Modules,
    NamedTensors,
    find_tied,
    flatten_resolved,
    is_leaf,
    iterate_named_leaves,
    pick_at,
    resolve_state,
)
from stepkeeper_planners.state.values import estimate_value_bytes
from stepkeeper_planners.state.whole import Whole

__all__ = ["LookUpResult", "StructureCache"]

T = TypeVar("T")

_PLAIN_DICT, _DICT, _LIST, _LEAF = "plain dict", "dict", "list", "leaf"
_NO_VALUES: Final = (torch.Tensor, PerRank, Whole)
"""Leaves of these classes aren't values: where one was a value before, or becomes one, the structure is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUpResult(Generic[T]):
    """A state's own leaves, and the result that was derived from its structure."""

    flat: FlatState
    derived: T
    """The same object for all states of one structure that are looked up one after another."""


class StructureCache(Generic[T]):
    """Hold the structure of the last state, and the result that was derived from it.

    Two states have one structure if they have the same nesting, keys and names; tensors of the same classes, dtypes,
    shapes, devices and placements, tied alike; values under the same names, the large ones of the same sizes. Their
    elements and values are their own.
    """

    def __init__(
        self, derive: Callable[[FlatState, Mapping[str, int]], T], *, large_value_bytes: int | None = None
    ) -> None:
        """Make an empty cache of the result that `derive` makes of a state and the sizes of its values.

        Sizes are rounded up to powers of two; below `large_value_bytes`, or without that, they are 0.
        """
        self._derive: Final = derive
        self._large_value_bytes: Final = large_value_bytes
        self._last: tuple[_Structure, T] | None = None

    def look_up(self, state: Mapping[str, object], modules: Modules = ()) -> LookUpResult[T]:
        """Flatten a nested state, and derive the result if its structure is not the last one.

        `modules` are those of a state in which `resolve_state` has replaced them.

        No computation of the state's tensors is pending afterwards. The state_dict() of every Stateful is
        called once. A structure for which `derive` raises is not held. Raises as `flatten_state`.
        """
        tree, found = resolve_state(state)
        modules = found or modules
        contents = _Contents(tree)
        with torch.no_grad():  # once, and not for each tensor
            fits = self._last is not None and self._last[0].fits(contents)
        if not fits:
            self._last = None
            contents.materialize()
            flat = flatten_resolved(tree, modules)
            structure = _Structure(contents, flat, self._large_value_bytes)
            self._last = structure, self._derive(flat, structure.value_bytes)
        assert self._last is not None
        structure, derived = self._last
        return LookUpResult(flat=structure.flatten(tree, modules, contents.leaves), derived=derived)

    def derive_again(self, flat: FlatState) -> T:
        """Derive the result again for the state that was looked up last: what `derive` does has changed."""
        assert self._last is not None
        structure, _ = self._last
        self._last = structure, self._derive(flat, structure.value_bytes)
        return self._last[1]


class _Contents:
    """The containers and the leaves of a resolved state, both in order."""

    def __init__(self, tree: Any) -> None:
        self.forms: list[object] = []
        """A description of each container, by which its items can be counted. Equal lists mean equal nesting."""

        self.leaves: list[Any] = []
        self.kinds: list[type] = []
        """The classes of the leaves."""

        self._add(tree)

    def materialize(self) -> None:
        """Run the pending computations of tensors: before that, even the placement of some is unknown."""
        adapters.materialize(leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))

    def _add(self, node: Any) -> None:
        if isinstance(node, Mapping):
            values = list(node.values())
            kinds = list(map(type, values))
            plain = PLAIN_LEAVES.issuperset(kinds)
            # The types of keys count, too: 1 and True are equal, but make different names.
            self.forms += (_PLAIN_DICT if plain else _DICT, list(node), list(map(type, node)))
            if isinstance(node, NamedState):
                self.forms.append(node.groups)
            if plain:
                self.leaves += values
                self.kinds += kinds
            else:
                for value in values:
                    self._add(value)
        elif is_leaf(node):
            self.forms.append(_LEAF)
            self.leaves.append(node)
            self.kinds.append(type(node))
        else:
            self.forms += (_LIST, len(node))
            for value in node:
                self._add(value)


class _Structure:
    """The structure of one state."""

    def __init__(self, contents: _Contents, flat: FlatState, large_value_bytes: int | None) -> None:
        self._forms: Final = contents.forms
        self._kinds = contents.kinds
        # Names of PerRank entries are in no path.
        names = [name for name, _ in iterate_named_leaves(flat.tree)] if flat.per_rank else flat.paths
        place = {name: index for index, name in enumerate(names)}
        self._pick_tensors: Final = pick_at([place[name] for name in flat.paths if name not in flat.values])
        tensors = self._pick_tensors(contents.leaves)
        # None if a tensor isn't ordinary. Ordinary ones have no placement and no pending computations.
        self._ordinary: Final = adapters.ordinary_forms(tensors)
        self._placed: Final = None if self._ordinary is not None else list(map(adapters.structure, tensors))
        self._tied: Final = find_tied(tensors, ordinary=self._ordinary is not None)
        self._kept: Final = {name: index for index, name in enumerate(flat.tensors)}
        self._pick_kept: Final = pick_at([place[name] for name in flat.tensors])
        self._values: Final = [(name, place[name]) for name in flat.values]
        self._per_rank: Final = [(name, place[name]) for name in flat.per_rank]
        self._wholes: Final = flat.wholes
        self._aliases: Final = flat.aliases
        self._paths: Final = flat.paths
        self._large_value_bytes: Final = large_value_bytes
        self._sizes: Final = self._measure_values(contents.leaves)
        sizes = self._sizes or [0] * len(flat.values)
        self.value_bytes: Final = dict(zip(flat.values, sizes, strict=True))
        """The size of each value, as a plan counts it."""

    def fits(self, contents: _Contents) -> bool:
        """Return whether a state with these contents has this structure."""
        if contents.forms != self._forms or not self._has_kinds(contents):
            return False
        tensors = self._pick_tensors(contents.leaves)
        if self._ordinary is not None:
            alike, are_there = self._ordinary.compare(tensors)
        else:
            contents.materialize()
            alike, are_there = list(map(adapters.structure, tensors)) == self._placed, False
        # In most saves all tensors are where they were at the first.
        tied_alike = are_there or (
            alike and find_tied(tensors, ordinary=self._ordinary is not None) == self._tied
        )
        return alike and tied_alike and self._measure_values(contents.leaves) == self._sizes

    def flatten(self, tree: Any, modules: Modules, leaves: Sequence[Any]) -> FlatState:
        """Flatten a state that fits."""
        per_rank: list[tuple[str, PerRank]] = [(name, leaves[index]) for name, index in self._per_rank]
        return FlatState(
            tensors=NamedTensors(self._kept, self._pick_kept(leaves)),
            values={name: _value_of(leaves[index]) for name, index in self._values},
            aliases=self._aliases,
            paths=self._paths,
            per_rank={name: box.value for name, box in per_rank},
            resizers={name: box.resize for name, box in per_rank},
            wholes=self._wholes,
            modules=modules,
            tree=tree,
        )

    def _has_kinds(self, contents: _Contents) -> bool:
        """Return whether the leaves are of these classes. A value may be of another class than before."""
        if contents.kinds == self._kinds:
            return True
        if len(contents.kinds) != len(self._kinds):
            return False
        pairs = zip(contents.kinds, self._kinds, strict=True)
        if any(new is not old and (_is_no_value(new) or _is_no_value(old)) for new, old in pairs):
            return False
        self._kinds = contents.kinds
        return True

    def _measure_values(self, leaves: Sequence[Any]) -> list[int] | None:
        limit = self._large_value_bytes
        if limit is None:
            return None
        sizes = (estimate_value_bytes(_value_of(leaves[index])) for _, index in self._values)
        # A value that grows from save to save is another one only each time that it has doubled.
        return [1 << (size - 1).bit_length() if size >= limit else 0 for size in sizes]


def _value_of(leaf: object) -> object:
    return leaf.value if isinstance(leaf, Whole) else leaf


def _is_no_value(kind: type) -> bool:
    return issubclass(kind, _NO_VALUES)
