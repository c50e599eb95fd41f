"""Mark keys that are no strings and empty dicts of a nested state, and rebuild the state from flat names.

torch.distributed.checkpoint makes strings of all keys and drops empty dicts. Both are marked in its planner data by
paths under names that no entry has. Every reader of checkpoints ignores such paths.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from stepkeeper_planners.errors import DuplicateNameError, SourceError
from stepkeeper_planners.state.key_texts import is_literal, parse_literal
from stepkeeper_planners.state.tree import Path, has_scalars_only, join_path

__all__ = ["encode_nesting", "is_mark_of_empty", "is_mark_of_foreign_key", "rebuild_nesting"]

_NUMBER: Final = "\0number"
_LITERAL: Final = "\0literal"
_FOREIGN: Final = "\0foreign"
_EMPTY: Final = "\0empty"
_MAX_DEPTH: Final = 200
_MOST_DIGITS: Final = 4000
"""The longest number that is a key; Python parses up to 4300 digits."""
_UNSET: Final = object()
"""The content of a place where nothing was put yet."""
_MOST_UNNAMED: Final = 1_000_000
"""The most list items that may be missing among the entries. Stock torch leaves out empty dicts."""


def encode_nesting(state: Mapping[Any, object] | list[Any], path: Path = ()) -> dict[str, Path]:
    """Return the paths to add to a checkpoint's planner data, which mark keys that are no strings and empty dicts.

    Args:
        state: a nested state, or a part of one.
        path: the keys that lead to it.

    Raises:
        DuplicateNameError: two keys or two empty dicts have one name.
    """
    marks: dict[str, Path] = {}
    for kind, below in _list_marks(state, path):
        other = marks.setdefault(join_path(below) + kind, below)
        if other is not below:
            raise DuplicateNameError(
                f"{below} and {other} are both named {join_path(below)!r} once keys are joined with dots; rename one"
            )
    return marks


def is_mark_of_empty(name: str) -> bool:
    """Tell whether a name of the planner data marks an empty dict."""
    return name.endswith(_EMPTY)


def is_mark_of_foreign_key(name: str) -> bool:
    """Tell whether a name of the planner data marks a key that can't be made again from its text."""
    return name.endswith(_FOREIGN)


def rebuild_nesting(leaves: Mapping[str, object], paths: Mapping[str, Path], *, where: str) -> dict[Any, Any]:
    """Nest the leaves under the keys that lead to them. A leaf without a path gets its name as the key.

    Args:
        leaves: the leaves by name.
        paths: the planner data: paths of leaves, and the marks of `encode_nesting`. It may be hostile.
        where: the file that the paths come from, for errors.

    Raises:
        SourceError: a path is malformed, leads to where another one does, or goes through what is no container by
            another one; or lists would have far more items than there are entries.
    """
    tree = _Tree(where, _MOST_UNNAMED + len(leaves) + len(paths))
    for fqn, leaf in leaves.items():
        tree.put_leaf(fqn, paths.get(fqn, (fqn,)), leaf)
    kinds: dict[Path, str] = {}
    for name, path in paths.items():
        if name.endswith(_EMPTY):
            tree.put_empty_dict(name.removesuffix(_EMPTY), path)
        for kind in (_NUMBER, _LITERAL):
            if name.endswith(kind):
                kinds[tree.check_path(name.removesuffix(kind), path)] = kind
    root: dict[Any, Any] = tree.build(kinds)
    return root


def _list_marks(node: object, path: Path) -> Iterator[tuple[str, Path]]:
    if isinstance(node, Mapping):
        if not node and path:
            yield _EMPTY, path
        if not {*map(type, node)} <= {str}:
            yield from _list_key_marks(node, path)
        for key, value in node.items():
            yield from _list_marks(value, (*path, str(key)))
    elif isinstance(node, list) and not has_scalars_only(node):
        for index, value in enumerate(node):
            yield from _list_marks(value, (*path, index))


def _list_key_marks(node: Mapping[Any, object], path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the marks of keys that aren't equal to their text.

    Raises:
        DuplicateNameError: two keys have one text.
    """
    texts: dict[str, object] = {}
    for key in node:
        text = str(key)
        if text in texts:
            raise DuplicateNameError(
                f"{key!r} and {texts[text]!r} are both named {join_path((*path, text))!r}; rename one"
            )
        texts[text] = key
        if type(key) is int:
            yield _NUMBER, (*path, text)
        elif text != key:
            yield _LITERAL if is_literal(key, text) else _FOREIGN, (*path, text)


class _Tree:
    """Build a nested state from one leaf after another."""

    def __init__(self, where: str, room: int) -> None:
        self._where = where
        self._room = room
        """The number of items that lists may still get."""
        self._root: dict[Any, Any] = {}
        self._made: dict[int, object] = {id(self._root): self._root}
        """The tree's own containers, by id. Values may be containers as well."""

    def put_leaf(self, name: str, path: Any, leaf: object) -> None:
        """Put a leaf at the end of the path."""
        node, key = self._find_parent(name, path)
        if node[key] is not _UNSET:
            raise self._error(name, path, "leads to where another one does")
        node[key] = leaf

    def put_empty_dict(self, name: str, path: Any) -> None:
        """Put a dict at the end of the path, if there is none."""
        node, key = self._find_parent(name, path)
        if node[key] is _UNSET:
            node[key] = self._new({})
        elif id(node[key]) not in self._made:
            raise self._error(name, path, "leads to where another one does")

    def check_path(self, name: str, path: Any) -> Path:
        """Return the path, which came from a file, if it is a valid one."""
        if (
            type(path) is not tuple
            or not 0 < len(path) <= _MAX_DEPTH
            or not all(type(key) is str or (type(key) is int and key >= 0) for key in path)
        ):
            raise self._error(name, path, "is no path to an entry")
        return path

    def build(self, kinds: Mapping[Path, str]) -> Any:
        """Return the tree, with the keys at which these paths end made from their texts."""
        return self._build(self._root, (), kinds)

    def _build(self, node: Any, path: Path, kinds: Mapping[Path, str]) -> Any:
        if id(node) not in self._made:
            return None if node is _UNSET else node
        if isinstance(node, list):
            return [self._build(item, (*path, index), kinds) for index, item in enumerate(node)]
        whole: dict[Any, Any] = {}
        for key, item in node.items():
            below = (*path, key)
            last = self._parse_key(below, kinds[below]) if below in kinds else key
            if last in whole:
                raise self._error(str(key), below, "leads to where another one does")
            whole[last] = self._build(item, below, kinds)
        return whole

    def _parse_key(self, path: Path, kind: str) -> object:
        text = str(path[-1])
        if kind == _LITERAL:
            try:
                return parse_literal(text)
            except ValueError:
                raise self._error(text, path, "ends in no key") from None
        if len(text) > _MOST_DIGITS or not text.removeprefix("-").isdecimal():
            raise self._error(text, path, "ends in no number")
        return int(text)

    def _find_parent(self, name: str, path: Any) -> tuple[Any, str | int]:
        """Return the container of the path's last key, and that key. The containers on the way are made."""
        node: Any = self._root
        keys = self.check_path(name, path)
        for key, after in zip(keys, (*keys[1:], None), strict=True):
            kind: Any = list if isinstance(key, int) else dict
            if id(node) not in self._made or not isinstance(node, kind):
                raise self._error(name, path, "doesn't fit those of the other entries")
            if isinstance(key, int):
                self._extend_list(name, path, node, key + 1)
            else:
                node.setdefault(key, _UNSET)
            if after is None:
                break
            if node[key] is _UNSET:
                node[key] = self._new([] if isinstance(after, int) else {})
            node = node[key]
        return node, keys[-1]

    def _extend_list(self, name: str, path: Path, items: list[Any], length: int) -> None:
        self._room -= max(0, length - len(items))
        if self._room < 0:
            raise self._error(name, path, "makes a list longer than all entries together")
        items.extend([_UNSET] * (length - len(items)))

    def _new(self, container: Any) -> Any:
        self._made[id(container)] = container
        return container

    def _error(self, name: str, path: object, reason: str) -> SourceError:
        return SourceError(f"{self._where}: the path {path!r:.80} of {name!r:.80} {reason}")
