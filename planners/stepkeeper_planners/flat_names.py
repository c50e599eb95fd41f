"""List the further names of an optimizer's options in a checkpoint: for each parameter, those of its group. Pure.

torch's `get_optimizer_state_dict` has two layouts. By default a group has its options: "param_groups.0.lr". With
`flatten_optimizer_state_dict`, which torchtitan reads, each parameter has them: "param_groups.layer.weight.lr". These
are the further names. Only `.metadata` has them, for the bytes that are stored under the group's name.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

__all__ = ["find_flat_names", "make_flat_names", "mark_groups"]

_MARK: Final = "\0flat"
"""Ends the name of a mark: an item of the planner data that lists a group's parameters."""


def mark_groups(groups: str, parameters: Iterable[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return a mark for each group of an optimizer. `groups` is their common name; `parameters` has names, by group."""
    return {f"{groups}.{number}{_MARK}": (_MARK, *names) for number, names in enumerate(parameters)}


def make_flat_names(planner_data: object, names: Collection[str]) -> dict[str, str]:
    """Return the further names to add to a checkpoint with these names, each with the name that its group has."""
    options: dict[str, list[str]] = {}
    for name in names:
        group, _, option = name.rpartition(".")
        options.setdefault(group, []).append(option)
    return {
        name: f"{group}.{option}"
        for parameter, group in _map_parameters(planner_data).items()
        for option in options.get(group, ())
        if option != "params" and (name := f"{parameter}.{option}") not in names
    }


def find_flat_names(planner_data: object, names: Iterable[str]) -> dict[str, str]:
    """Return the further names among those in a checkpoint, each with the name that its group has."""
    groups = _map_parameters(planner_data)
    # Most checkpoints have no such optimizer: then none of their many names is split.
    split = (name.rpartition(".") for name in names) if groups else ()
    return {
        f"{parameter}.{option}": f"{groups[parameter]}.{option}"
        for parameter, _, option in split
        if parameter in groups
    }


def _map_parameters(planner_data: object) -> dict[str, str]:
    """Map the prefix of each parameter's options, "param_groups.layer.weight", to its group's, "param_groups.0"."""
    data: Mapping[Any, Any] = planner_data if isinstance(planner_data, Mapping) else {}
    # Other writers may have anything in their planner data.
    marked = {
        name.removesuffix(_MARK): path[1:]
        for name, path in data.items()
        if isinstance(name, str) and name.endswith(_MARK) and isinstance(path, tuple) and path[:1] == (_MARK,)
    }
    found = {f"{group.rpartition('.')[0]}.{name}": group for group, names in marked.items() for name in names}
    # A parameter named "0" would have the prefix of group 0, so it gets no further names.
    return {parameter: group for parameter, group in found.items() if parameter not in marked}
