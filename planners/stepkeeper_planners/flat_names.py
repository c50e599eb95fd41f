"""List the further names under which a checkpoint has an optimizer's options: those of each parameter. Pure.

torch's `get_optimizer_state_dict` has two layouts. torchtitan reads the one of `flatten_optimizer_state_dict`, in which
every parameter has the options of its group. Only `.metadata` has these names, for the bytes that the group has anyway.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

__all__ = ["find_flat_names", "make_flat_names", "mark_groups"]

_MARK: Final = "\0flat"


def mark_groups(groups: str, parameters: Iterable[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the marks of an optimizer's groups for a checkpoint's planner data, under names that no entry has.

    `groups` is the groups' name, and `parameters` has the names of the parameters, by group.
    """
    return {f"{groups}.{number}{_MARK}": (_MARK, *names) for number, names in enumerate(parameters)}


def make_flat_names(planner_data: object, names: Collection[str]) -> dict[str, str]:
    """Return the further names to give to a checkpoint's entries, each with the name that its group has."""
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
    split = (name.rpartition(".") for name in names) if groups else ()
    return {
        f"{parameter}.{option}": f"{groups[parameter]}.{option}"
        for parameter, _, option in split
        if parameter in groups
    }


def _map_parameters(planner_data: object) -> dict[str, str]:
    """Map the prefix of the names of each parameter's options to that of its group's."""
    data: Mapping[Any, Any] = planner_data if isinstance(planner_data, Mapping) else {}
    marked = {
        name.removesuffix(_MARK): path[1:]
        for name, path in data.items()
        if isinstance(name, str) and name.endswith(_MARK) and isinstance(path, tuple) and path[:1] == (_MARK,)
    }
    found = {f"{group.rpartition('.')[0]}.{name}": group for group, names in marked.items() for name in names}
    # A parameter may be named as a group is.
    return {parameter: group for parameter, group in found.items() if parameter not in marked}
