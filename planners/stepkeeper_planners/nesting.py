"""A nested state of flat names, and what the names don't say: which keys were numbers, which dicts were empty.

torch.distributed.checkpoint makes strings of all keys and drops empty dicts. Both are noted among its planner data
as paths of names that no entry has, which every reader of checkpoints passes over.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from stepkeeper_planners.errors import SourceError
from stepkeeper_planners.state import Path, has_scalars_only

__all__ = ["nested", "notes"]

_NUMBER: Final = "\0number"
_EMPTY: Final = "\0empty"
_MAX_DEPTH: Final = 200
_MOST_UNNAMED: Final = 1_000_000
"""Items of lists for which there is no entry: stock notes none for empty dicts."""


def notes(state: Mapping[Any, object]) -> dict[str, Path]:
    """The entries for the planner data of a checkpoint with this state."""
    return {".".join(map(str, path)) + kind: path for kind, path in _notes(state, ())}


def nested(leaves: Mapping[str, object], paths: Mapping[str, Path]) -> dict[Any, Any]:
    """The leaves under the keys that lead to them; one without a path under its name.

    Raises:
        SourceError: a path is none, or leads through what another one says is something else; or lists would have
            far more items than there are entries.
    """
    root: dict[Any, Any] = {}
    room = _Room(_MOST_UNNAMED + len(leaves) + len(paths))
    for fqn, leaf in leaves.items():
        _set(root, _checked(paths.get(fqn, (fqn,))), leaf, room)
    numbers: set[Path] = set()
    for name, path in paths.items():
        if name.endswith(_EMPTY):
            _set(root, _checked(path), {}, room)
        elif name.endswith(_NUMBER):
            if not str(_checked(path)[-1]).removeprefix("-").isdecimal():
                raise SourceError(f"{path!r} ends in no number")
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


@dataclass(slots=True)
class _Room:
    """How many more items lists may get."""

    items: int


def _checked(path: Any) -> Path:
    """A path that came from a file."""
    if (
        type(path) is not tuple
        or not 0 < len(path) <= _MAX_DEPTH
        or not all(type(key) is str or (type(key) is int and key >= 0) for key in path)
    ):
        raise SourceError(f"{path!r:.80} is no path to an entry")
    return path


def _set(node: Any, path: Path, leaf: object, room: _Room) -> None:
    for key, after in zip(path, (*path[1:], None), strict=True):
        kind: Any = list if isinstance(key, int) else dict
        if not isinstance(node, kind):
            raise SourceError(f"the path {path} doesn't fit those of the other entries")
        if isinstance(key, int):
            room.items -= max(0, key + 1 - len(node))
            if room.items < 0:
                raise SourceError(f"the path {path!r:.80} makes a list longer than all entries together")
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
