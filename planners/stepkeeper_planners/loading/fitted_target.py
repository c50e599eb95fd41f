"""Request the state of optimizers by the names that a checkpoint has, and map what was read back to the state's names.

A checkpoint may have the state of parameters by their numbers, or the parameters in other groups than the state.
"""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from itertools import chain
from typing import Any, Final

import torch

from stepkeeper_planners.dtypes import dtype_of
from stepkeeper_planners.loading.load_request import LoadTarget
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.loading.stored_state import StoredState
from stepkeeper_planners.state.named_optimizer import NamedState, find_named_states
from stepkeeper_planners.state.optimizer_groups import GroupOptions, StoredGroup, explain_sizes
from stepkeeper_planners.state.tree import flatten_resolved, iterate_named_leaves, join_path

__all__ = ["FittedTarget"]

_log: Final = logging.getLogger(__name__)

_IS_LIST: Final = re.compile(r"\d+\.params")
"""Matches a name below the groups' name, such as "0.params", that occurs only if the groups are stored as a list."""


class FittedTarget(LoadTarget):
    """A state, by the names that one checkpoint has for its entries.

    The names differ from the state's for an optimizer only. If the checkpoint has its parameters' state by number, that
    is requested by number. All stored entries of its groups are requested, since only they show which group a parameter
    was in. The tensors among them are read into separate memory.
    """

    def __init__(self, target: LoadTarget, stored: StoredState, rules: LoadRules) -> None:
        """Compare the names of optimizers in the state and in the checkpoint. `rules` are for the state's names."""
        super().__init__(target.state)
        self.resizable = target.resizable
        self.flat = self.filled = target.flat
        """`flat` has the requested entries. `filled` has those to fill: the groups in it are the state's own."""

        tree = target.flat.tree
        optimizers = list(find_named_states(tree))
        # The names in `further` only repeat options that the groups have: see flat_names.py.
        names = frozenset((*stored.tensors, *stored.values)).difference(stored.further) if optimizers else ()
        fitted = [_Optimizer(path, present, names, stored) for path, present in optimizers]
        renamed = {name: own for each in fitted for name, own in each.list_renamed()}
        self.rules: Final = replace(rules, renamed=renamed)
        """The same rules for the requested names."""

        self._aliases: Final = target.flat.aliases
        # Those of which the rules select anything.
        self._optimizers: Final = [
            each
            for each in fitted
            if any(
                self.rules.selects(join_path((*each.path, name)))
                for name, _ in iterate_named_leaves(each.state)
            )
        ]
        self.of_groups = frozenset(name for each in self._optimizers for name in each.requested)
        if self._optimizers:
            requested = [(each.path, each.with_requested()) for each in self._optimizers]
            self.flat = flatten_resolved(reduce(_put, requested, tree))
        # Otherwise all entries to fill have the state's own names.
        if any(each.stored_by == "numbers" for each in self._optimizers):
            present = [(each.path, each.state) for each in self._optimizers]
            self.filled = flatten_resolved(reduce(_put, present, tree))

    def list_filled(self, requested: Iterable[str]) -> frozenset[str]:
        """Return the state's names of the entries that are filled by reading the `requested` names."""
        names = [self.rules.name_in_state(name) for name in requested if name not in self.of_groups]
        for each in self._optimizers:
            # Any stored entry of the groups may determine any option.
            options = iterate_named_leaves(each.state["param_groups"]) if each.requested else ()
            names += filter(self.rules.selects, (f"{each.below}.{option}" for option, _ in options))
        return frozenset(self._aliases.get(name, name) for name in names)

    def assign_group_options(self, read: Mapping[str, object], *, is_first_rank: bool) -> GroupOptions:
        """Give the optimizers' groups their options.

        Args:
            read: the values by the names by which they were requested. The tensors have been read, too.
            is_first_rank: whether to log, once for all ranks, that parameters were matched by their order.
        """
        options = GroupOptions(selects=self.rules.selects, cast=self.rules.cast)
        for each in self._optimizers:
            stored, state = list(each.build_groups(read)), each.state
            by_number = any(type(key) is int for params, _ in stored for key in params)
            reason = each.explain_refusal([params for params, _ in stored], by_number=by_number)
            if reason is not None:
                options.mismatched[join_path(each.path)] = reason
                continue
            keys = state.numbers if by_number else state.groups
            # `name_groups` makes up names that begin with #, from the parameters' order.
            nameless = sum(str(key).startswith("#") for params, _ in stored for key in params)
            why = f"{nameless} of its parameters are in no module of the state, and have no names"
            if by_number:
                why = "the checkpoint has its parameters by position, not by name"
            options.assign(each.below, state["param_groups"], keys, stored)
            if (by_number or nameless) and is_first_rank:
                _log.warning(
                    "%s: %s: restored in the order of the parameters, after a comparison of shapes",
                    join_path(each.path),
                    why,
                )
        return options


class _Optimizer:
    """An optimizer of the state, as the checkpoint has it."""

    def __init__(
        self, path: tuple[Any, ...], present: NamedState, names: Collection[str], stored: StoredState
    ) -> None:
        """Find out by the checkpoint's `names` whether it has the state of parameters by name or by number."""
        self.path, self.stored_by = path, ""
        """`stored_by` is "names" or "numbers", as the checkpoint has the parameters' state, or "" if it has none."""

        parameters = {name for group in present.groups for name in group}
        # Other entries of its state have the same names in both.
        own = {name: entry for name, entry in present["state"].items() if name in parameters}
        named = present.with_content({**present, "state": own})
        for by, state in (("numbers", named.with_numbers()), ("names", named)):
            if any(
                join_path((*path, "state", name)) in names for name, _ in iterate_named_leaves(state["state"])
            ):
                self.stored_by = by
        self.state = present.with_numbers() if self.stored_by == "numbers" else present
        self.below: Final = join_path((*path, "param_groups"))
        """The name of its groups."""

        rests = sorted(n.removeprefix(f"{self.below}.") for n in names if n.startswith(f"{self.below}."))
        self.is_flat: Final = not any(map(_IS_LIST.fullmatch, rests))
        """True if each parameter has the options of its group, as with torch's `flatten_optimizer_state_dict`."""

        # Beside the flat entries of this optimizer's parameters there may be those of other ranks' parameters.
        mine = (rest for rest in rests if not self.is_flat or self._split(rest)[0] in parameters)
        requested = [f"{self.below}.{rest}" for rest in mine]
        if not requested and self.below in names:
            # Older writers store a list without tensors as one value.
            requested = [self.below]
        self.requested: Final = {name: _make_memory(name, stored) for name in requested}
        """The stored names of its groups' entries, with memory for those that are tensors."""

    def list_renamed(self) -> Iterator[tuple[str, str]]:
        """Yield the parts of its state that the checkpoint has by number, with their names in the state."""
        numbers = chain(*self.state.numbers) if self.stored_by == "numbers" else ()
        for number, name in zip(numbers, chain(*self.state.groups), strict=False):
            yield join_path((*self.path, "state", number)), join_path((*self.path, "state", name))

    def with_requested(self) -> NamedState:
        """Return its state with the requested entries in place of its groups."""
        below = f"{self.below}."
        groups = {name.removeprefix(below): leaf for name, leaf in self.requested.items()}
        # If the groups are stored as one value, they are one entry under their own name.
        requested: Any = groups.get(self.below, groups)
        return self.state.with_content({**self.state, "param_groups": requested})

    def build_groups(self, read: Mapping[str, object]) -> Iterator[StoredGroup]:
        """Build the stored groups from their entries, which may be hostile. Skip those without a list of parameters."""
        by_group: dict[str, dict[str, object]] = {}
        for name, memory in self.requested.items():
            leaf = read[name] if memory is None else memory
            if name == self.below:
                listed = leaf if isinstance(leaf, list) else []
                by_group |= {
                    str(number): dict(iterate_named_leaves(group)) for number, group in enumerate(listed)
                }
                continue
            group, option = self._split(name.removeprefix(f"{self.below}."))
            by_group.setdefault(group, {"params": [group]} if self.is_flat else {})[option] = leaf
        # In the order of their numbers: 9 before 10.
        for _, leaves in sorted(by_group.items(), key=lambda item: (len(item[0]), item[0])):
            params = leaves.get("params")
            if isinstance(params, list) and {*map(type, params)} <= {int, str}:
                yield params, leaves

    def explain_refusal(self, params: list[list[object]], *, by_number: bool) -> str | None:
        """Explain why it can't get the options of stored groups with these parameters; None if it can.

        Names that only one side has are compared by `GroupOptions.assign`.
        """
        # A number in a name may also be a name: a ParameterList names its parameters 0, 1 and so on.
        if self.stored_by and by_number != (self.stored_by == "numbers"):
            return "the parameters have positions on one side, and numbers as their names on the other"
        if by_number and params != self.state.numbers:
            reason = explain_sizes(list(map(len, params)), list(map(len, self.state.groups)))
            reason = reason or "its numbers aren't positions"
            return f"{reason}, and the checkpoint doesn't name the parameters"
        if self.state.is_joint and not by_number and params and params != self.state.groups:
            return "its parameters share state in their order, and the parameters or their order have changed"
        return None

    def _split(self, rest: str) -> tuple[str, str]:
        """Split a name below the groups' name into the group, or its parameter, and the option."""
        group, _, option = rest.rpartition(".") if self.is_flat else rest.partition(".")
        return group, option


def _make_memory(name: str, stored: StoredState) -> torch.Tensor | None:
    found = stored.tensors.get(name)
    return None if found is None else torch.empty(found.global_shape, dtype=dtype_of(found.dtype))


def _put(tree: Any, placed: tuple[tuple[Any, ...], object]) -> Any:
    """Return the tree with an item at a path. Everything off the path is the same object."""
    path, item = placed
    if not path:
        return item
    copy = tree.copy()
    copy[path[0]] = _put(tree[path[0]], (path[1:], item))
    return copy
