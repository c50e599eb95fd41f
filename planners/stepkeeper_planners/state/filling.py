"""Write loaded values back into a nested state, and rebuild a state with other leaves.

A box is a `PerRank` or a `Whole` in the state. A place is where a load may put a value: an item of a dict or list.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from stepkeeper_planners import adapters
from stepkeeper_planners.adapters.open_shardings import keep_shardings_open, skip_self_copies
from stepkeeper_planners.errors import UnsupportedValueError
from stepkeeper_planners.state.named_optimizer import NamedState
from stepkeeper_planners.state.optimizer_tensors import keep_filled_tensors
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.random_state import RandomState
from stepkeeper_planners.state.scalars import PLAIN_LEAVES
from stepkeeper_planners.state.tree import FlatState, Path, empty_like, is_leaf, is_stateful, join_path
from stepkeeper_planners.state.whole import Whole, fill_value

__all__ = ["finish_load", "rebuild_state"]


def finish_load(state: Mapping[str, object], flat: FlatState, values: Mapping[str, Any]) -> None:
    """Put loaded values into the state, in place; give every Stateful its part by load_state_dict().

    `flat` is the flattened state. Its tensors are filled already, but for those in `values`, which were read into other
    memory. An entry whose name isn't in `values` keeps its present value.

    The load leaves no work to the training's next program. Pending work, or data left on the host, would make
    the first step another program than in an uninterrupted run, which may round differently. Open shardings
    stay open. Raises UnsupportedValueError if a value would go into a container that can't be changed.
    """
    tensors = flat.tensors
    copied = {name: tensors[first] for name in values if (first := flat.aliases.get(name, name)) in tensors}
    others = {name: value for name, value in values.items() if name not in copied}
    with keep_shardings_open(tensors.values()):
        with torch.no_grad():
            for name, tensor in copied.items():
                tensor.copy_(values[name])
        set_generators = _fill_others(state, flat, others)
        adapters.materialize(tensors.values())
        adapters.start_pending(tuple(tensors.values()))
    for set_them in set_generators:
        # After all programs: on XLA, each advances the generator.
        set_them()


def _fill_others(
    state: Mapping[str, object], flat: FlatState, values: Mapping[str, object]
) -> list[Callable[[], None]]:
    """Fill all but tensors. Return the calls that set random generators, for when the load draws no more numbers."""
    if is_stateful(state):
        # The state is one object, and no place is in it.
        _load_stateful(state, flat.tree, (), values)
        return []
    places = list(_iterate_places(state, flat.tree, (), values))
    times = Counter(id(place.item) for place in places if isinstance(place.item, list | dict))
    places = [replace(place, shared=True) if times[id(place.item)] > 1 else place for place in places]
    # All are checked before any is changed.
    for place in places:
        place.check(values)
    last: list[Callable[[], None]] = []
    for place in places:
        place.assign(values, last)
    return last


def rebuild_state(flat: FlatState, leaves: Mapping[str, object]) -> dict[str, Any]:
    """Rebuild the nested state in new containers, from leaves by name. A Stateful is replaced by its state_dict()."""
    tree: dict[str, Any] = _rebuild(flat.tree, (), leaves)
    return tree


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in the user's own containers where a load may change something."""

    container: Any
    key: Any
    path: Path
    tree: Any
    """The same part of the flattened state's tree, where an object is replaced by the result of its state_dict()."""
    shared: bool
    """True if its list or dict is also at another place, which may get other items. Then it isn't filled in place."""

    @property
    def item(self) -> Any:
        return self.container[self.key]

    def check(self, values: Mapping[str, object]) -> None:
        """Raise UnsupportedValueError if there is a value for this place, and its container can't be changed."""
        item = self.item
        if is_stateful(item) or isinstance(item, PerRank | Whole) or join_path(self.path) not in values:
            return
        if not isinstance(self.container, MutableMapping | list):
            raise UnsupportedValueError(
                f"{join_path(self.path)}: a {type(self.container).__name__} can't be changed in place; "
                "use a dict or a list"
            )

    def assign(self, values: Mapping[str, object], last: list[Callable[[], None]]) -> None:
        """Load a Stateful, or put the value into its container or box. Add to `last` the calls to make at the end."""
        item, name = self.item, join_path(self.path)
        if isinstance(item, RandomState):
            last.append(partial(_load_stateful, item, self.tree, self.path, values))
        elif is_stateful(item):
            _load_stateful(item, self.tree, self.path, values)
        elif name not in values:
            return
        elif isinstance(item, PerRank | Whole):
            item.value = fill_value(item.value, values[name], in_place=isinstance(item, Whole), last=last)
        else:
            in_place = isinstance(item, list | dict) and not self.shared
            self.container[self.key] = fill_value(item, values[name], in_place=in_place, last=last)


def _iterate_places(node: Any, tree: Any, path: Path, values: Mapping[str, object]) -> Iterator[_Place]:
    is_list = isinstance(node, list)
    for key in range(len(node)) if is_list else list(node):
        below = (*path, key if is_list else str(key))
        item, part = node[key], tree[key]
        has_value = join_path(below) in values
        if type(item) in PLAIN_LEAVES and not has_value:
            # Tensors have been filled already, thousands of them.
            continue
        # A dict or list may have a value of its own, if it is loaded with another number of items.
        is_object = is_stateful(item) or isinstance(item, PerRank | Whole)
        if is_object or is_leaf(part) or has_value:
            yield _Place(node, key, below, part, shared=False)
        else:
            yield from _iterate_places(item, part, below, values)


def _load_stateful(node: object, tree: Any, path: Path, values: Mapping[str, object]) -> None:
    assert isinstance(node, Stateful)
    loaded = _rebuild(tree, path, values)
    load: Callable[[Any], object] = node.load_state_dict
    if isinstance(loaded, NamedState):
        # An optimizer takes its parameters' numbers, not the names that the checkpoint has.
        load, loaded = loaded.make_load(node, values, join_path((*path, "param_groups")))
    with skip_self_copies(), keep_filled_tensors(node, loaded):
        try:
            load(loaded)
        except Exception as error:
            where = f"for {join_path(path)!r}" if path else "for the state"
            error.add_note(
                f"raised by {type(node).__name__}.load_state_dict() {where}; parts of the state are loaded already"
            )
            raise


def _rebuild(tree: object, path: Path, values: Mapping[str, object]) -> Any:
    """Rebuild a sub-tree with its loaded values, as load_state_dict() gets it. Keys have their original types."""
    if isinstance(tree, Mapping):
        rebuilt = empty_like(tree)
        for key, part in tree.items():
            rebuilt[key] = _rebuild(part, (*path, str(key)), values)
        return rebuilt
    if isinstance(tree, PerRank | Whole):
        return values.get(join_path(path), tree.value)
    if is_leaf(tree):
        return values.get(join_path(path), tree)
    assert isinstance(tree, list)
    return [_rebuild(part, (*path, index), values) for index, part in enumerate(tree)]
