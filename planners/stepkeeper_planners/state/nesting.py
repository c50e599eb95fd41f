"""Mark what a nested state loses when it is flattened, and rebuild it from the flat names and the marks.

torch.distributed.checkpoint makes strings of all keys and drops empty dicts. A mark is an additional item of its
planner data: the path to such a key or dict, under a name that no entry has. Every reader of checkpoints ignores it.
"""

import ast
from collections.abc import Iterator, Mapping
from typing import Any, Final

from stepkeeper_planners.errors import DuplicateNameError, SourceError
from stepkeeper_planners.flat_names import mark_groups
from stepkeeper_planners.state.named_optimizer import find_named_states
from stepkeeper_planners.state.scalars import has_plain_leaves_only, has_scalars_only
from stepkeeper_planners.state.tree import Path, join_path

__all__ = ["encode_nesting", "is_mark_of_empty", "is_mark_of_foreign_key", "rebuild_nesting"]

# Each ends the names of one kind of mark.
_NUMBER: Final = "\0number"
"""The path ends in a key that is an int."""
_LITERAL: Final = "\0literal"
"""It ends in another key that `_parse_literal` makes from its text."""
_FOREIGN: Final = "\0foreign"
"""It ends in a key that can't be made from its text."""
_EMPTY: Final = "\0empty"
"""It leads to an empty dict."""
_MAX_DEPTH: Final = 200
_MOST_CHARACTERS: Final = 1000
"""The longest text of a key that isn't a string."""
_KINDS: Final = frozenset({type(None), bool, int, float, complex, str, bytes, tuple})
_MOST_UNNAMED: Final = 1_000_000
"""The most items of a list that may be missing among the entries. Stock torch leaves out empty dicts."""


def encode_nesting(state: Mapping[Any, object] | list[Any], paths: Mapping[str, Path]) -> dict[str, Path]:
    """Return the marks of keys that aren't strings, of empty dicts, and of optimizers' groups: see `mark_groups`.

    `paths` has the keys that lead to each leaf. Raises DuplicateNameError if two keys or two empty dicts have one name,
    or an empty dict has that of a leaf.
    """
    marks: dict[str, Path] = {}
    for kind, below in _list_marks(state, ()):
        name = join_path(below)
        other = marks.setdefault(name + kind, below)
        if kind == _EMPTY:
            other = paths.get(name, other)
        if other is not below:
            raise DuplicateNameError(
                f"{below} and {other} are both named {name!r} once keys are joined with dots; rename one"
            )
    for path, optimizer in find_named_states(state):
        marks |= mark_groups(join_path((*path, "param_groups")), optimizer.groups)
    return marks


def is_mark_of_empty(name: str) -> bool:
    """Return whether a name of the planner data marks an empty dict."""
    return name.endswith(_EMPTY)


def is_mark_of_foreign_key(name: str) -> bool:
    """Return whether a name of the planner data marks a key that can't be rebuilt from its text."""
    return name.endswith(_FOREIGN)


def rebuild_nesting(leaves: Mapping[str, object], paths: Mapping[str, Path], *, where: str) -> dict[Any, Any]:
    """Nest the leaves under the keys that lead to them. A leaf without a path gets its name as the key.

    The paths are the planner data: those of leaves, and the marks of `encode_nesting`. They may be hostile.
    Raises SourceError, with the file `where` they come from, if a path is malformed, if two lead to one place or one
    goes through another's leaf, or if a list would have far more items than there are entries.
    """
    root = _Node()
    for fqn, leaf in leaves.items():
        path = _check_path(fqn, paths.get(fqn, (fqn,)), where)
        node = _find_node(root, fqn, path, path[:-1], where)
        if path[-1] in node:
            raise _path_error(where, fqn, path, "leads to where another one does")
        node[path[-1]] = leaf
    kinds: dict[Path, str] = {}
    for mark, path in paths.items():
        kind = next((each for each in (_EMPTY, _NUMBER, _LITERAL) if mark.endswith(each)), None)
        if kind is None:
            continue
        name = mark.removesuffix(kind)
        _check_path(name, path, where)
        if kind == _EMPTY:
            _find_node(root, name, path, path, where)
        else:
            kinds[path] = kind
    built: dict[Any, Any] = _build(root, (), kinds, where, _MOST_UNNAMED + len(leaves) + len(paths))
    return built


class _Node(dict[Any, Any]):
    """A container that is rebuilt, by keys or by the indexes of a list. A leaf may be a plain dict."""


def _check_path(name: str, path: Any, where: str) -> Path:
    """Return the path, which came from a file, if it is a valid one."""
    if (
        type(path) is not tuple
        or not 0 < len(path) <= _MAX_DEPTH
        or not all(type(key) is str or (type(key) is int and key >= 0) for key in path)
        or type(path[0]) is int
    ):
        raise _path_error(where, name, path, "isn't a path to an entry")
    return path


def _find_node(root: _Node, name: str, path: Path, keys: Path, where: str) -> _Node:
    """Return the container at `keys`, the beginning of the path. Make it and those on the way if they aren't there."""
    node = root
    for key in keys:
        node = node.setdefault(key, _Node())
        if type(node) is not _Node:
            raise _path_error(where, name, path, "doesn't fit those of the other entries")
    return node


def _build(node: Any, path: Path, kinds: Mapping[Path, str], where: str, most: int) -> Any:
    """Make lists and dicts of the nodes. `kinds` has the paths of marked keys, `most` is the most items of a list."""
    if type(node) is not _Node:
        return node
    built = {key: _build(item, (*path, key), kinds, where, most) for key, item in node.items()}
    indexes = [key for key in built if type(key) is int]
    if indexes and (len(indexes) < len(built) or max(indexes) >= most):
        raise _path_error(
            where, join_path(path), path, "leads to something that isn't a list, or is far too long"
        )
    if indexes:
        return [built.get(index) for index in range(max(indexes) + 1)]
    by_original_key: dict[Any, Any] = {}
    for key, item in built.items():
        below = (*path, key)
        original = _parse_key(below, kinds[below], where) if below in kinds else key
        if original in by_original_key:
            raise _path_error(where, key, below, "leads to where another one does")
        by_original_key[original] = item
    return by_original_key


def _parse_key(path: Path, kind: str, where: str) -> object:
    text = str(path[-1])
    try:
        return _parse_literal(text) if kind == _LITERAL else int(text)
    except ValueError:
        raise _path_error(where, text, path, "doesn't end in a valid key") from None


def _path_error(where: str, name: str, path: object, reason: str) -> SourceError:
    return SourceError(f"{where}: the path {path!r:.80} of {name!r:.80} {reason}")


def _list_marks(node: object, path: Path) -> Iterator[tuple[str, Path]]:
    if isinstance(node, Mapping):
        if not node and path:
            yield _EMPTY, path
        if not {*map(type, node)} <= {str}:
            yield from _list_key_marks(node, path)
        if has_plain_leaves_only(node.values()):
            return
        for key, value in node.items():
            yield from _list_marks(value, (*path, str(key)))
    elif isinstance(node, list) and not has_scalars_only(node):
        for index, value in enumerate(node):
            yield from _list_marks(value, (*path, index))


def _list_key_marks(node: Mapping[Any, object], path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the marks of keys that aren't equal to their text. Raises DuplicateNameError."""
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
            yield _LITERAL if _is_literal(key, text) else _FOREIGN, (*path, text)


def _is_literal(key: object, text: str) -> bool:
    """Return whether `_parse_literal` makes an equal key from this text. Numpy's integers become those of Python."""
    try:
        parsed = _parse_literal(text)
    except ValueError:
        return False
    if type(parsed) is not type(key):
        return type(parsed) is int and bool(parsed == key)
    return repr(parsed) == repr(key)


def _parse_literal(text: str) -> object:
    """Parse the text of a key: None, a number, bytes, or a tuple of these and strings. Raises ValueError."""
    if len(text) > _MOST_CHARACTERS:
        raise ValueError("too long for a key")
    try:
        # float() also reads "inf" and "nan", which aren't literals.
        return int(text) if text.removeprefix("-").isdecimal() else float(text)
    except ValueError:
        pass
    try:
        parsed = ast.literal_eval(text)
    except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError("not a literal") from error
    _check_kind(parsed)
    return parsed


def _check_kind(key: object) -> None:
    if type(key) not in _KINDS:
        raise ValueError(f"a {type(key).__name__} can't be a key")
    for part in key if isinstance(key, tuple) else ():
        _check_kind(part)
