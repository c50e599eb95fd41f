"""A nested state of flat names, and what the names don't say: which keys were numbers, which dicts were empty.

torch.distributed.checkpoint makes strings of all keys and drops empty dicts. Both are noted among its planner data
as paths of names that no entry has, which every reader of checkpoints passes over.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from stepkeeper_planners.errors import SourceError
from stepkeeper_planners.state import Path, has_scalars_only

__all__ = ["nested", "notes"]

_NUMBER: Final = "\0number"
_EMPTY: Final = "\0empty"


def notes(state: Mapping[Any, object]) -> dict[str, Path]:
    """The entries for the planner data of a checkpoint with this state."""
    return {".".join(map(str, path)) + kind: path for kind, path in _notes(state, ())}


def nested(leaves: Mapping[str, object], paths: Mapping[str, Path]) -> dict[Any, Any]:
    """The leaves under the keys that lead to them; one without a path under its name.

    Raises:
        SourceError: a path leads through what another one says is something else.
    """
    root: dict[Any, Any] = {}
    longest = len(leaves) + len(paths)
    for fqn, leaf in leaves.items():
        _set(root, _checked(paths.get(fqn, (fqn,)), longest), leaf)
    numbers: set[Path] = set()
    for name, path in paths.items():
        if name.endswith(_EMPTY):
            _set(root, _checked(path, longest), {})
        elif name.endswith(_NUMBER):
            numbers.add(path)
    if numbers:
        root = _with_numbers(root, (), numbers)
    return root


def _notes(node: object, path: Path) -> Iterator[tuple[str, Path]]:
    if isinstance(node, Mapping):
        if not node and path:
            yield _EMPTY, path
        for key, value in node.items():
            below = (*path, str(key))
            if type(key) is int:
                yield _NUMBER, below
            yield from _notes(value, below)
    elif isinstance(node, list) and not has_scalars_only(node):
        for index, value in enumerate(node):
            yield from _notes(value, (*path, index))


def _checked(path: Path, longest: int) -> Path:
    """A path that came from a file: no list gets longer than there are entries."""
    if not path or not all(isinstance(key, str) or 0 <= key < longest for key in path):
        raise SourceError(f"{path!r} is no path to an entry")
    return path


def _set(node: Any, path: Path, leaf: object) -> None:
    for key, after in zip(path, (*path[1:], None), strict=True):
        kind: Any = list if isinstance(key, int) else dict
        if not isinstance(node, kind):
            raise SourceError(f"the path {path} doesn't fit those of the other entries")
        if isinstance(key, int):
            node.extend([None] * (key + 1 - len(node)))
        present = node[key] if isinstance(key, int) else node.get(key)
        if after is None:
            node[key] = leaf
        elif present is None:
            node[key] = [] if isinstance(after, int) else {}
        node = node[key]


def _with_numbers(node: Any, path: Path, numbers: set[Path]) -> Any:
    if isinstance(node, dict):
        return {
            int(key) if (*path, key) in numbers else key: _with_numbers(value, (*path, key), numbers)
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [_with_numbers(value, (*path, index), numbers) for index, value in enumerate(node)]
    return node
