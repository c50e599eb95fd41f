"""Assign options, such as learning rates, from the groups of an optimizer in a checkpoint to those in the state.

The groups may have other parameters then and now. A group gets the options of the stored groups with its parameters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
from torch.optim import Optimizer

from stepkeeper_planners import adapters
from stepkeeper_planners.state.named_optimizer import ADDED, NamedState
from stepkeeper_planners.state.optimizer_tensors import has_torchs_load
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.scalars import has_plain_leaves_only, has_scalars_only
from stepkeeper_planners.state.tree import Path, iterate_named_leaves, join_path
from stepkeeper_planners.state.values import encode_value
from stepkeeper_planners.state.whole import Whole

__all__ = ["GroupOptions", "StoredGroup", "explain_sizes", "find_other_groups"]

StoredGroup = tuple[list[Any], Mapping[str, Any]]
"""The names or numbers of a group's parameters, and its entries: those in dicts under keys joined with dots."""

_NOT_OPTIONS: Final = frozenset({"params", "param_names"})
"""The entries of a group that list its parameters. A load leaves them as they are."""

_SHOWN: Final = 8


@dataclass(slots=True, kw_only=True)
class GroupOptions:
    """The options that the groups of optimizers get, by their names in the state, and the reasons if some don't fit."""

    selects: Callable[[str], bool]
    """Returns whether a name is to be loaded."""

    cast: bool
    """Whether tensors may be converted to the state's dtypes."""

    values: dict[str, object] = field(default_factory=dict)
    left_over: dict[str, str] = field(default_factory=dict)
    """Differences that a load passes over if it isn't strict, by name."""

    mismatched: dict[str, str] = field(default_factory=dict)
    """Differences that every load refuses, by name."""

    added: dict[str, str] = field(default_factory=dict)
    """The options that groups get though they had none of the name, with a text for a warning. They aren't refused."""

    _of_tensors: dict[int, tuple[str, Any]] = field(default_factory=dict)
    """The option that each tensor of the state gets, with its name, by the tensor's id(). Groups may share a tensor."""

    def assign(
        self,
        below: str,
        groups: Sequence[Mapping[str, Any]],
        keys: Sequence[Sequence[object]],
        stored: Sequence[StoredGroup],
    ) -> None:
        """Assign to each of an optimizer's groups the options of the stored groups that its parameters are in.

        A group without parameters gets those of the stored group of its number, if that has none either. `below` is
        the groups' name. `keys` has the names or numbers that the checkpoint has for the parameters of each group.
        """
        stored_of = {key: entries for params, entries in stored for key in params}
        present = {key for params in keys for key in params}
        differing = []
        for side, lacking in (
            ("checkpoint", present - stored_of.keys()),
            ("state", stored_of.keys() - present),
        ):
            names = sorted(map(str, lacking))
            shown = ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
            differing += [f"the {side} has no group with {shown}"] if names else []
        if differing and self.selects(below):
            self.left_over[below] = "; ".join(differing)
        for number, (group, params) in enumerate(zip(groups, keys, strict=True)):
            # Each stored group once.
            sources = {id(stored_of[key]): stored_of[key] for key in params if key in stored_of}
            if not params and number < len(stored) and not stored[number][0]:
                sources = {0: stored[number][1]}
            if params or sources:
                self._assign_group(f"{below}.{number}", group, list(sources.values()))
            elif self.selects(f"{below}.{number}"):
                self.left_over[f"{below}.{number}"] = (
                    "it has no parameters, and the checkpoint has no group without any in its place"
                )

    def _assign_group(
        self, below: str, group: Mapping[str, Any], sources: Sequence[Mapping[str, Any]]
    ) -> None:
        added: dict[str, object] = {}
        own = dict(iterate_named_leaves(group))
        for option in dict.fromkeys((*own, *chain(*sources))):
            name, found = f"{below}.{option}", [each[option] for each in sources if option in each]
            if option.partition(".")[0] in _NOT_OPTIONS or not self.selects(name):
                continue
            if not found:
                self.left_over[name] = "the checkpoint's group has no such entry"
            elif len(found) < len(sources) or not all(_is_same(found[0], other) for other in found[1:]):
                shown = ", ".join(dict.fromkeys(map(repr, found)))
                self.left_over[name] = (
                    f"the checkpoint has this group's parameters in several groups, with different values: {shown}"
                )
            elif option in own:
                self._assign_option(name, own[option], found[0])
            elif option.partition(".")[0] in group or "." in option:
                # An option is added only if the state has nothing of its name, and not if it is a dict.
                self.left_over[name] = "the state's group has no such entry"
            else:
                added[option] = found[0]
                self.added[name] = "the state's group had no such entry, and has got the checkpoint's"
        self.values[f"{below}.{ADDED}"] = added

    def _assign_option(self, name: str, own: object, found: Any) -> None:
        """Assign the option `found` in the checkpoint to one that the state has, if it is of the same kind."""
        own_kind, found_kind = _describe(own), _describe(found)
        first_name, first_found = name, found
        if isinstance(own, torch.Tensor) and isinstance(found, torch.Tensor):
            first_name, first_found = self._of_tensors.setdefault(id(own), (name, found))
            if self.cast and found.shape == own.shape and torch.can_cast(found.dtype, own.dtype):
                own_kind = found_kind
        if own_kind != found_kind:
            self.mismatched[name] = f"{found_kind} in the checkpoint, {own_kind} in the state"
        elif not _is_same(first_found, found):
            self.mismatched[name] = (
                f"one tensor in the state with {first_name}, another one in the checkpoint"
            )
        else:
            # Distributed here, before any tensor of the state is changed: it may fail.
            self.values[name] = adapters.distribute_as(own, found) if isinstance(own, torch.Tensor) else found


def _describe(option: Any) -> str:
    if isinstance(option, torch.Tensor):
        return f"a tensor of {option.dtype} with shape {tuple(option.shape)}"
    return "a plain value"


def _is_same(one: object, other: object) -> bool:
    """Return whether two options are equal. 1 and True are not; nan and nan are."""
    if has_scalars_only([one, other]):
        return type(one) is type(other) and repr(one) == repr(other)
    return one is other or encode_value("", one) == encode_value("", other)


def find_other_groups(
    state: Mapping[str, object], tree: object, values: Mapping[str, object]
) -> dict[str, str]:
    """Find the optimizers whose load_state_dict() will raise because a group has another number of parameters.

    Return the name of each, and how its groups differ. Optimizers with a `NamedState` are left out: their groups are
    compared by name. So are those with a custom load_state_dict(), or a hook for it: they may accept any number.
    """
    found = {}
    for path, optimizer, groups in _iterate_unnamed(state, tree, (), values):
        reason = explain_sizes(groups, [len(group["params"]) for group in optimizer.param_groups])
        if reason is not None:
            found[join_path(path) or "param_groups"] = reason
    return found


def explain_sizes(stored: Sequence[int | None], present: Sequence[int]) -> str | None:
    """Explain how the numbers of parameters of groups differ; None if they don't. A stored number of None fits."""
    if len(stored) != len(present):
        return f"{len(stored)} groups in the checkpoint, {len(present)} in the state"
    differing = [
        f"group {number} has {n_stored} parameters in the checkpoint, {n_present} in the state"
        for number, (n_stored, n_present) in enumerate(zip(stored, present, strict=True))
        if n_stored not in {n_present, None}
    ]
    return "; ".join(differing) or None


def _iterate_unnamed(
    node: Any, loaded: Any, path: Path, values: Mapping[str, object] | None
) -> Iterator[tuple[Path, Optimizer, list[int | None]]]:
    """Yield the optimizers without names, with the number of parameters of each group that they are to load.

    `loaded` is the node in the resolved state. In a `PerRank` or `Whole`, which are stored as one value, it is what was
    read for the node, and `values` is None.
    """
    if isinstance(node, PerRank | Whole):
        within = loaded if values is None else values.get(join_path(path))
        yield from _iterate_unnamed(node.value, within, path, None)
    elif isinstance(node, Optimizer):
        optimizer = None if isinstance(loaded, NamedState) else _unwrap(node)
        groups = loaded.get("param_groups") if isinstance(loaded, Mapping) else None
        if optimizer is not None and isinstance(groups, list):
            lists = [
                (values or {}).get(join_path((*path, "param_groups", number, "params")), group.get("params"))
                for number, group in enumerate(groups)
            ]
            yield path, optimizer, [len(each) if isinstance(each, list) else None for each in lists]
    elif isinstance(node, Mapping):
        for key, part in () if has_plain_leaves_only(node.values()) else node.items():
            below = loaded.get(key) if isinstance(loaded, Mapping) else None
            yield from _iterate_unnamed(part, below, (*path, str(key)), values)
    elif isinstance(node, list) and values is not None and not has_scalars_only(node):
        # A list in a `PerRank` or `Whole` may have been saved with other items, so it isn't searched.
        for index, part in enumerate(node):
            yield from _iterate_unnamed(part, loaded[index], (*path, index), values)


def _unwrap(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer that takes the groups by torch's own rules: this one, or the one that it wraps."""
    if has_torchs_load(optimizer):
        return optimizer
    wrapped = getattr(optimizer, "optimizer", None)
    return _unwrap(wrapped) if isinstance(wrapped, Optimizer) else None
