"""Find the parts of a state that a load may give another number of items than they have now."""

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
    """A list, an empty dict, a plain value or a `Whole` in a state."""

    path: Path
    length: int | None
    """The number of a list's items. A list of as many is loaded item by item. None: as a whole, in any case."""


def find_resizable(state: Mapping[str, object], flat: FlatState) -> dict[str, Resizable]:
    """Find the parts of a state that are loaded with as many items as were saved, by name.

    These are, in the training's own dicts and lists: lists of plain values, also of dicts of them, empty
    dicts, and plain values, in whose place a dict or list may have been saved. The result of an object's
    state_dict() is compared entry by entry. A `Whole` is such a part anywhere.
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
    """Return whether there is no tensor, object or box in a list or dict."""
    if is_stateful(node) or isinstance(node, torch.Tensor | PerRank | Whole):
        return False
    if not isinstance(node, Mapping | list) or (isinstance(node, list) and has_scalars_only(node)):
        return True
    return all(map(_is_plain, node.values() if isinstance(node, Mapping) else node))
