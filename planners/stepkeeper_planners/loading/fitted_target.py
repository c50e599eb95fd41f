"""Ask a checkpoint for an optimizer's state by the names that it has there, and give it back by those of the state."""

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from functools import reduce
from typing import Any, Final

import torch

from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.loading.load_request import LoadTarget
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.loading.stored_state import StoredState
from stepkeeper_planners.state.named_optimizer import NamedState, find_named_states
from stepkeeper_planners.state.optimizer_groups import Given, StoredGroup, explain_sizes
from stepkeeper_planners.state.tree import flatten_resolved, join_path, list_leaves

__all__ = ["FittedTarget"]

_log: Final = logging.getLogger(__name__)

_IS_LIST: Final = re.compile(r"\d+\.params")
"""Matches what shows, below the name of groups, that they are stored as a list."""


class FittedTarget(LoadTarget):
    """A state as one checkpoint is asked for it.

    It differs from the state in the optimizers that are named by their parameters. Of their groups, all that the
    checkpoint has is asked for, tensors into memory of their own: which group a parameter is in is known only when
    that is read. The state of their parameters is asked for by numbers if that is how it was saved.
    """

    def __init__(self, target: LoadTarget, stored: StoredState, rules: LoadRules) -> None:
        """Compare the names of optimizers.

        Args:
            target: the state.
            stored: the checkpoint.
            rules: which names of the state are loaded, and how.
        """
        super().__init__(target.state)
        self.resizable = target.resizable
        self.flat = self.filled = target.flat
        """`filled` has the names that the state is filled by."""

        tree = target.flat.tree
        self._rules: Final = rules
        optimizers = list(find_named_states(tree))
        known = frozenset((*stored.tensors, *stored.values)).difference(stored.further) if optimizers else ()
        fitted = [_Optimizer(path, present, known, stored) for path, present in optimizers]
        self._optimizers: Final = [
            each
            for each in fitted
            if any(rules.selects(join_path((*each.path, name))) for name, _ in list_leaves(each.state))
        ]
        self.of_groups = frozenset(name for each in self._optimizers for name in each.asked)
        if self._optimizers:
            asked = [(each.path, each.with_asked()) for each in self._optimizers]
            self.flat = flatten_resolved(reduce(_put, asked, tree))
        if any(each.found == "numbers" for each in self._optimizers):
            present = [(each.path, each.state) for each in self._optimizers]
            self.filled = flatten_resolved(reduce(_put, present, tree))

    def give_back(self, read: Mapping[str, object], *, is_first_rank: bool) -> Given:
        """Give the optimizers' groups their options.

        Args:
            read: the values by the names by which they were asked for. The tensors have been read, too.
            is_first_rank: whether to log, once for all ranks, that an optimizer was saved by position.
        """
        given = Given(selects=self._rules.selects, cast=self._rules.cast)
        for each in self._optimizers:
            stored, state = list(each.build_groups(read)), each.state
            by_number = any(type(key) is int for params, _ in stored for key in params)
            reason = each.explain_refusal([params for params, _ in stored], by_number=by_number)
            if reason is not None:
                given.mismatched[join_path(each.path)] = reason
                continue
            keys = state.numbers if by_number else state.groups
            given.give(each.below, state["param_groups"], keys, stored)
            if by_number and is_first_rank:
                _log.warning(
                    "%s: the checkpoint has its parameters by position, not by name: restored in the order of the "
                    "parameters, after a comparison of shapes",
                    join_path(each.path),
                )
        return given


class _Optimizer:
    """An optimizer of the state, as the checkpoint has it."""

    def __init__(
        self, path: tuple[Any, ...], present: NamedState, known: Collection[str], stored: StoredState
    ) -> None:
        """Find out how the checkpoint, which has the `known` names, names it."""
        self.path, self.state, self.found = path, present, ""
        """`found`: what the checkpoint has its parameters' state by: "names", "numbers", or "" if it has none."""
        for by, state in (("numbers", present.with_numbers()), ("names", present)):
            if any(join_path((*path, "state", name)) in known for name, _ in list_leaves(state["state"])):
                self.found, self.state = by, state
        self.below: Final = join_path((*path, "param_groups"))
        rests = sorted(n.removeprefix(f"{self.below}.") for n in known if n.startswith(f"{self.below}."))
        self.is_flat: Final = not any(map(_IS_LIST.fullmatch, rests))
        """True if groups are stored for each parameter, as with torch's `flatten_optimizer_state_dict`."""

        parameters = {name for group in present.groups for name in group}
        # Those of other parameters are left over.
        mine = (rest for rest in rests if not self.is_flat or self._split(rest)[0] in parameters)
        asked = [f"{self.below}.{rest}" for rest in mine] or [self.below] * (self.below in known)
        self.asked: Final = {name: _make_memory(name, stored) for name in asked}
        """The stored names of its groups' entries, with memory for those that are tensors."""

    def with_asked(self) -> NamedState:
        """Return its state with what is asked for in place of the groups."""
        below = f"{self.below}."
        groups = {name.removeprefix(below): leaf for name, leaf in self.asked.items()}
        # Older writers store a list without tensors as one value.
        asked: Any = groups.get(self.below, groups)
        return self.state.with_content({**self.state, "param_groups": asked})

    def build_groups(self, read: Mapping[str, object]) -> Iterator[StoredGroup]:
        """Make the stored groups of their entries, which may be hostile. One without a list of parameters is none."""
        by_group: dict[str, dict[str, object]] = {}
        for name, memory in self.asked.items():
            leaf = read[name] if memory is None else memory
            if name == self.below:
                listed = leaf if isinstance(leaf, list) else []
                by_group |= {str(number): dict(list_leaves(group)) for number, group in enumerate(listed)}
                continue
            group, option = self._split(name.removeprefix(f"{self.below}."))
            by_group.setdefault(group, {"params": [group]} if self.is_flat else {})[option] = leaf
        for _, leaves in sorted(by_group.items(), key=lambda item: (len(item[0]), item[0])):
            params = leaves.get("params")
            if isinstance(params, list) and {*map(type, params)} <= {int, str}:
                yield params, leaves

    def explain_refusal(self, params: list[list[object]], *, by_number: bool) -> str | None:
        """Explain why stored groups of these parameters can't be its own. Other names are compared elsewhere."""
        if self.found and by_number != (self.found == "numbers"):
            return "the parameters have positions on one side, and numbers as their names on the other"
        if by_number and params != self.state.numbers:
            reason = explain_sizes(list(map(len, params)), list(map(len, self.state.groups)))
            reason = reason or "its numbers are no positions"
            return f"{reason}, and the checkpoint doesn't name the parameters"
        if self.state.is_joint and not by_number and self.found and params != self.state.groups:
            return "its parameters have state together, in their order, and they or their order differ now"
        return None

    def _split(self, rest: str) -> tuple[str, str]:
        """Split the rest of the name of a group's entry into the group and the option."""
        group, _, option = rest.rpartition(".") if self.is_flat else rest.partition(".")
        return group, option


def _make_memory(name: str, stored: StoredState) -> torch.Tensor | None:
    found = stored.tensors.get(name)
    return None if found is None else torch.empty(found.global_shape, dtype=dtype_of(found.dtype))


def _put(tree: Any, placed: tuple[tuple[Any, ...], object]) -> Any:
    """Return the tree with an item at a path. What isn't on the way is the same."""
    path, item = placed
    if not path:
        return item
    copy = tree.copy()
    copy[path[0]] = _put(tree[path[0]], (path[1:], item))
    return copy
