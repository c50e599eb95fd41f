"""Find the parts of a state that a load may give another number of items than they have now.

A list of losses, or an empty dict that a later step fills, is saved with other items than it has after a restart.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.scalars import has_scalars_only
from stepkeeper_planners.state.tree import FlatState, Path, is_stateful, join_path
from stepkeeper_planners.state.whole import Whole

__all__ = ["Resizable", "find_resizable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resizable:
    """A part of a state that a load may give another number of items, with the keys that lead to it."""

    path: Path
    length: int | None
    """The number of a list's items: if as many were saved, they are loaded one by one. None if it isn't a list."""


def find_resizable(state: Mapping[str, object], flat: FlatState) -> dict[str, Resizable]:
    """Find the parts that are loaded with as many items as were saved, by name.

    These are every `Whole`, and in the training's own dicts and lists: lists without tensors and objects, empty dicts,
    and plain values, in whose place a dict or list may have been saved. The result of an object's state_dict() is
    compared entry by entry.
    """
    found = {} if is_stateful(state) else {join_path(each.path): each for each in _walk(state, ())}
    for name in flat.wholes:
        found[name] = Resizable(path=flat.paths[name], length=None)
    return found


def _walk(node: Mapping[Any, object] | list[Any], path: Path) -> Iterator[Resizable]:
    items = node.items() if isinstance(node, Mapping) else enumerate(node)
    for key, item in items:
        if is_stateful(item) or isinstance(item, torch.Tensor | PerRank | Whole):
            continue
        below = (*path, key if isinstance(node, list) else str(key))
        if isinstance(item, list) and _is_plain(item):
            yield Resizable(path=below, length=len(item))
        elif not isinstance(item, Mapping | list) or not item:
            yield Resizable(path=below, length=None)
        else:
            yield from _walk(item, below)


def _is_plain(node: object) -> bool:
    """Return whether there is no tensor, Stateful, `PerRank` or `Whole` in a list or dict."""
    if is_stateful(node) or isinstance(node, torch.Tensor | PerRank | Whole):
        return False
    if isinstance(node, Mapping):
        return all(map(_is_plain, node.values()))
    return not isinstance(node, list) or has_scalars_only(node) or all(map(_is_plain, node))
