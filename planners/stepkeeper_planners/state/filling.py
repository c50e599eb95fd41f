"""Write loaded values back into a nested state, and rebuild a state with other leaves."""

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.stateful import Stateful

from stepkeeper_planners.errors import UnsupportedValueError
from stepkeeper_planners.state.per_rank import PerRank
from stepkeeper_planners.state.tree import FlatState, Path, empty_like, is_leaf, is_stateful, join_path

__all__ = ["fill_state", "rebuild_state"]


def fill_state(state: Mapping[str, object], flat: FlatState, values: Mapping[str, object]) -> None:
    """The values are in the state, in place; every Stateful got its part by load_state_dict().

    `values` holds those of `flat.values` and `flat.per_rank` that were loaded, by the names they have there. A name
    that it lacks keeps its present value. Tensors of `flat` are expected to be filled already.

    Raises:
        UnsupportedValueError: a value would have to be put into a container that can't be changed.
    """
    if is_stateful(state):
        _load_stateful(state, flat.tree, (), values)
        return
    places = list(_iterate_places(state, flat.tree, ()))
    for place in places:
        place.check(values)
    for place in places:
        place.assign(values)


def rebuild_state(flat: FlatState, leaves: Mapping[str, object]) -> dict[str, Any]:
    """The nested state with these leaves by name; every Stateful is what its state_dict() gave."""
    tree: dict[str, Any] = _rebuild(flat.tree, (), leaves)
    return tree


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in the user's own containers something stands that a load may change."""

    container: Any
    key: Any
    path: Path
    tree: Any

    def check(self, values: Mapping[str, object]) -> None:
        """What is going to be given can be."""
        item = self.container[self.key]
        if is_stateful(item) or isinstance(item, PerRank) or join_path(self.path) not in values:
            return
        if not isinstance(self.container, MutableMapping | list):
            raise UnsupportedValueError(
                f"{join_path(self.path)}: a {type(self.container).__name__} can't be changed in place; use a dict or a list"
            )

    def assign(self, values: Mapping[str, object]) -> None:
        """The object has its state, the box or the container its value."""
        item, name = self.container[self.key], join_path(self.path)
        if is_stateful(item):
            _load_stateful(item, self.tree, self.path, values)
        elif name not in values:
            return
        elif isinstance(item, PerRank):
            item.value = _merge_loaded(item.value, values[name])
        else:
            self.container[self.key] = values[name]


def _iterate_places(node: Any, tree: Any, path: Path) -> Iterator[_Place]:
    is_list = isinstance(node, list)
    for key in range(len(node)) if is_list else list(node):
        below = (*path, key if is_list else str(key))
        item, part = node[key], tree[key]
        if is_stateful(item) or isinstance(item, PerRank) or is_leaf(part):
            yield _Place(node, key, below, part)
        else:
            yield from _iterate_places(item, part, below)


def _load_stateful(node: object, tree: Any, path: Path, values: Mapping[str, object]) -> None:
    assert isinstance(node, Stateful)
    node.load_state_dict(_rebuild(tree, path, values))


def _merge_loaded(node: object, loaded: object) -> object:
    """The loaded value of a box, with the objects that are in it now, which have got their state."""
    if is_stateful(node):
        assert isinstance(node, Stateful)
        node.load_state_dict(loaded)  # type: ignore[arg-type]  # what its state_dict() gave when it was saved
        return node
    if isinstance(node, Mapping) and isinstance(loaded, Mapping):
        return {key: _merge_loaded(node.get(key), part) for key, part in loaded.items()}
    return loaded


def _rebuild(tree: object, path: Path, values: Mapping[str, object]) -> Any:
    """The sub-tree with its stored values: what load_state_dict() gets, keys of their first types."""
    if isinstance(tree, Mapping):
        rebuilt = empty_like(tree)
        for key, part in tree.items():
            rebuilt[key] = _rebuild(part, (*path, str(key)), values)
        return rebuilt
    if isinstance(tree, PerRank):
        return values.get(join_path(path), tree.value)
    if is_leaf(tree):
        return values.get(join_path(path), tree)
    assert isinstance(tree, list)
    return [_rebuild(part, (*path, index), values) for index, part in enumerate(tree)]
