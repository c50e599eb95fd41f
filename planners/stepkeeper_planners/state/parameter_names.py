"""Name an optimizer's parameters as the modules of the same state name them."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from stepkeeper_planners.adapters import identity
from stepkeeper_planners.state.scalars import has_scalars_only

__all__ = ["find_optimizers", "name_groups", "name_parameters", "name_tensors"]

_WRAPPED: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""The names that torch.compile, FSDP1 and activation checkpointing give the module that they wrap."""


_GROUPS: Final = re.compile(r"(?:(.*?)\.)?param_groups(?:\.|$)")
"""Matches the flat names of an optimizer's groups."""


def find_optimizers(names: Iterable[str]) -> set[str]:
    """Find the optimizers whose groups are among these names; "" if the state is an optimizer's."""
    return {found[1] or "" for found in map(_GROUPS.match, names) if found}


def name_groups(optimizer: Optimizer, modules: Mapping[str, Mapping[int, str]]) -> list[list[str]]:
    """Name an optimizer's parameters by identity, group by group. No name is there twice.

    The names are those of torch's `get_optimizer_state_dict`. If the parameters are in several `modules` of
    the state, which `name_parameters` has named, each name begins with the module's. A parameter in no module
    has the name that the optimizer was given for it, or else one such as "#3(2,4)": its number and its shape.
    """
    groups = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    known = _find_names(list(map(id, parameters)), modules)
    given = chain.from_iterable(map(_list_given, groups))
    names = [known.get(id(p), name) for p, name in zip(parameters, given, strict=True)]
    times = Counter(names)
    unique = iter(
        name if name is not None and times[name] == 1 else f"#{number}({','.join(map(str, p.shape))})"
        for number, (p, name) in enumerate(zip(parameters, names, strict=True))
    )
    return [list(islice(unique, len(group["params"]))) for group in groups]


def _list_given(group: Mapping[str, Any]) -> Sequence[str | None]:
    """List the names that the optimizer was given for a group; all None if parameters were added without names."""
    names, length = group.get("param_names") or (), len(group["params"])
    return names if len(names) == length else [None] * length


def _find_names(wanted: Sequence[int], modules: Mapping[str, Mapping[int, str]]) -> dict[int, str]:
    found = {key: [p for p in wanted if p in named] for key, named in modules.items()}
    names: dict[int, tuple[str, str]] = {}
    # The module that has most of them comes first: a part of it may be in the state as well.
    for key in sorted(found, key=lambda key: (-len(found[key]), -len(modules[key]), key)):
        for parameter in found[key]:
            names.setdefault(parameter, (key, modules[key][parameter]))
    is_one_module = len({key for key, _ in names.values()}) == 1
    return {p: name if is_one_module or not key else f"{key}.{name}" for p, (key, name) in names.items()}


def name_parameters(module: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter, by its id(), without the parts of wrappers.

    A tensor's own hash takes several times as long as its id().
    """
    names: dict[int, str] = {}
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, prefix: str) -> None:
        if module in seen:
            return
        seen.add(module)
        for name, parameter in module._parameters.items():  # noqa: SLF001 — named_parameters() costs several times as much
            if parameter is not None:
                names.setdefault(id(parameter), prefix + name)
        for name, child in module._modules.items():  # noqa: SLF001
            if child is not None:
                walk(child, prefix if _is_wrapped(module, name) else f"{prefix}{name}.")

    walk(module, "")
    return names


def name_tensors(
    tree: object, parameters: Sequence[torch.Tensor], skipped: Collection[tuple[Any, ...]]
) -> dict[str, dict[int, str]]:
    """Name parameters by the tensors of a resolved state that share their memory, as those of model.state_dict() do.

    Return what `name_parameters` returns for a module, for each innermost dict around such tensors, by the dict's
    name. The dicts to which the `skipped` keys lead are left out.
    """
    wanted = {identity(parameter): id(parameter) for parameter in parameters}
    wanted.pop(None, None)  # the identity of a parameter without memory
    names: dict[str, dict[int, str]] = {}

    # The first `n_prefix` keys lead to the innermost dict around the node; the others name the tensor in it.
    def walk(node: object, path: tuple[Any, ...], n_prefix: int) -> None:
        if isinstance(node, Mapping) and path not in skipped:
            for key, part in node.items():
                walk(part, (*path, key), len(path))
        elif isinstance(node, list) and not has_scalars_only(node):
            for index, part in enumerate(node):
                walk(part, (*path, index), n_prefix)
        elif isinstance(node, torch.Tensor) and not node.is_nested and identity(node) in wanted:
            prefix, name = (".".join(map(str, keys)) for keys in (path[:n_prefix], path[n_prefix:]))
            names.setdefault(prefix, {}).setdefault(wanted[identity(node)], name)

    walk(tree, (), 0)
    return names


def _is_wrapped(wrapper: nn.Module, name: str) -> bool:
    if name == "module":
        return isinstance(wrapper, nn.parallel.DistributedDataParallel | nn.DataParallel)
    return name in _WRAPPED
