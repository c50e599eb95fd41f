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
    """Put loaded values into the state, in place; give every Stateful its part by load_state_dict().

    Args:
        state: the nested state from which `flat` was made.
        flat: the flat state. Its tensors have been filled already.
        values: the loaded values of `flat.values` and `flat.per_rank`, by the same names. A name that is not in it
            keeps its present value.

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
    """Rebuild the nested state with other leaves, which are given by name.

    The containers are new, of the same kinds. Every Stateful is replaced by what its state_dict() returned.
    """
    tree: dict[str, Any] = _rebuild(flat.tree, (), leaves)
    return tree


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in the user's own containers where a load may change something."""

    container: Any
    key: Any
    path: Path
    tree: Any

    def check(self, values: Mapping[str, object]) -> None:
        """Raise UnsupportedValueError if there is a value for this place, and its container can't be changed."""
        item = self.container[self.key]
        if is_stateful(item) or isinstance(item, PerRank) or join_path(self.path) not in values:
            return
        if not isinstance(self.container, MutableMapping | list):
            raise UnsupportedValueError(
                f"{join_path(self.path)}: a {type(self.container).__name__} can't be changed in place; "
                "use a dict or a list"
            )

    def assign(self, values: Mapping[str, object]) -> None:
        """Load a Stateful, or put the value into its container or its PerRank."""
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
    """Return the loaded value of a PerRank, with the Statefuls that are in it now, loaded."""
    if is_stateful(node):
        assert isinstance(node, Stateful)
        node.load_state_dict(loaded)  # type: ignore[arg-type]  # what its state_dict() gave when it was saved
        return node
    if isinstance(node, Mapping) and isinstance(loaded, Mapping):
        return {key: _merge_loaded(node.get(key), part) for key, part in loaded.items()}
    return loaded


def _rebuild(tree: object, path: Path, values: Mapping[str, object]) -> Any:
    """Rebuild a sub-tree with its loaded values, as load_state_dict() gets it. Keys have their original types."""
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
