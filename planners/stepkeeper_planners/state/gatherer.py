"""`gather_state`, over and over: what depends only on how a state is built is found out once.

A state may have tens of thousands of tensors, and training waits while they are gathered: what is done for each of
them here is a few passes in C, not a few lines of Python.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from stepkeeper_planners import adapters
from stepkeeper_planners.state.nesting import notes
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.tree import (
    FlatState,
    Path,
    flatten,
    has_plain_leaves_only,
    is_leaf,
    leaves_of,
    resolve_state,
)

__all__ = ["Build", "Gathered", "Gatherer"]

_PLAIN_DICT, _DICT, _LIST, _LEAF = "plain dict", "dict", "list", "leaf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What states that are built alike have in common. One object for them all, if they come one after the other."""

    structures: Sequence[tuple[str, object]]
    """Of the tensors by name, as `adapters.structure` says it."""

    key_paths: Mapping[str, Path]
    """Name → the keys that lead to it; and what the names don't say of the nesting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    flat: FlatState
    build: Build


class Gatherer:
    """Gathers states; remembers how the last one was built."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def gather(self, state: Mapping[str, object]) -> Gathered:
        """The flat form of a nested state, of which no computation is pending any more.

        state_dict() of every Stateful was called once.

        Raises:
            DuplicateNameError: two entries get the same name.
            UnsupportedValueError: a Stateful holds itself.
        """
        tree = resolve_state(state)
        contents = _Contents(tree)
        known = self._known
        if known is None or not known.fits(contents):
            self._known = None
            contents.materialize()
            known = self._known = _Known(contents, flatten(tree))
        return Gathered(flat=known.flat_of(tree, contents.leaves), build=known.build)


class _Contents:
    """The containers of a resolved state, and its leaves, both in order."""

    def __init__(self, tree: Any) -> None:
        self.forms: list[object] = []
        """What each container says decides how many of those that follow are in it: equal lists are equal nestings."""

        self.leaves: list[Any] = []
        self._add(tree)
        self.kinds: Final = list(map(type, self.leaves))

    def materialize(self) -> None:
        """No tensor has a computation pending: before that, not even where it lies is known of all."""
        tensors = (leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))
        adapters.materialize({str(index): tensor for index, tensor in enumerate(tensors)})

    def _add(self, node: Any) -> None:
        if isinstance(node, Mapping):
            values = list(node.values())
            plain = has_plain_leaves_only(values)
            # Of keys the types, too: those of a 1 and a True, which are equal, make different names.
            self.forms += (_PLAIN_DICT if plain else _DICT, list(node), list(map(type, node)))
            if plain:
                self.leaves += values
            else:
                for value in values:
                    self._add(value)
        elif is_leaf(node):
            self.forms.append(_LEAF)
            self.leaves.append(node)
        else:
            self.forms += (_LIST, len(node))
            for value in node:
                self._add(value)


class _Known:
    """How one state was built."""

    def __init__(self, contents: _Contents, flat: FlatState) -> None:
        self._forms: Final = contents.forms
        self._kinds: Final = contents.kinds
        place = {name: index for index, (name, _) in enumerate(leaves_of(flat.tree))}
        self._tensors: Final = [place[name] for name in flat.paths if name not in flat.values]
        tensors = [contents.leaves[index] for index in self._tensors]
        self._ordinary: Final = adapters.ordinary_forms(tensors)
        self._structures: Final = (
            None if self._ordinary is not None else list(map(adapters.structure, tensors))
        )
        self._tied: Final = _tied(tensors, ordinary=self._ordinary is not None)
        self._kept: Final = [(name, place[name]) for name in flat.tensors]
        self._values: Final = [(name, place[name]) for name in flat.values]
        self._per_rank: Final = [(name, place[name]) for name in flat.per_rank]
        self._aliases: Final = flat.aliases
        self._paths: Final = flat.paths
        structures = ((name, adapters.structure(tensor)) for name, tensor in flat.tensors.items())
        known: dict[object, object] = {}
        self.build: Final = Build(
            structures=[(name, known.setdefault(each, each)) for name, each in structures],
            key_paths=flat.paths | notes(flat.tree),
        )

    def fits(self, contents: _Contents) -> bool:
        """Whether a state with these contents is built like that one: other tensors and values, nothing else."""
        if contents.kinds != self._kinds or contents.forms != self._forms:
            return False
        tensors = [contents.leaves[index] for index in self._tensors]
        if self._ordinary is not None:
            alike = adapters.have_forms(tensors, self._ordinary)
        else:
            contents.materialize()
            alike = list(map(adapters.structure, tensors)) == self._structures
        return alike and _tied(tensors, ordinary=self._ordinary is not None) == self._tied

    def flat_of(self, tree: Any, leaves: Sequence[Any]) -> FlatState:
        """The flat form of a state that fits."""
        per_rank: list[tuple[str, PerRank]] = [(name, leaves[index]) for name, index in self._per_rank]
        return FlatState(
            tensors={name: leaves[index] for name, index in self._kept},
            values={name: leaves[index] for name, index in self._values},
            aliases=self._aliases,
            paths=self._paths,
            per_rank={name: box.value for name, box in per_rank},
            resizers={name: box.resize for name, box in per_rank},
            tree=tree,
        )


def _tied(tensors: Sequence[torch.Tensor], *, ordinary: bool) -> dict[int, int]:
    """For each tensor that is an earlier one too: which one's."""
    suspects: Sequence[int] = range(len(tensors))
    if ordinary:
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if len(set(addresses)) == len(addresses):
            return {}
        times = Counter(addresses)
        suspects = [index for index in suspects if times[addresses[index]] > 1]
    first: dict[object, int] = {}
    tied: dict[int, int] = {}
    for index in suspects:
        identity = adapters.identity(tensors[index])
        if identity is not None and first.setdefault(identity, index) != index:
            tied[index] = first[identity]
    return tied
