"""Match lists and dicts of values that may have other items in the checkpoint than in the state now.

Such a part is stored as one value or entry by entry. It is read as a whole where its items differ, or are unknown.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from stepkeeper_planners.loading.load_request import LoadRequest, Path
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.loading.state_reads import ValueRead
from stepkeeper_planners.loading.stored_state import StoredState
from stepkeeper_planners.state.nesting import is_mark_of_empty, is_mark_of_foreign_key
from stepkeeper_planners.state.per_rank import parse_stored_name
from stepkeeper_planners.state.resizable import Resizable
from stepkeeper_planners.state.tree import join_path

__all__ = ["ResizedReads", "match_resizable"]


def match_resizable(request: LoadRequest, stored: StoredState, rules: LoadRules) -> "ResizedReads":
    """Find the lists and dicts of the state that are to be read as a whole.

    Other parts are matched name by name, as everything else: parts that are one value on both sides, lists with as many
    items on both sides, and those saved with tensors or `PerRank` values in them.
    """
    found = ResizedReads(request, stored)
    for fqn, part in request.resizable.items():
        if rules.selects(fqn) and not (fqn in request.values and fqn in found.values):
            found.match(fqn, part)
    return found


class ResizedReads:
    """The reads of lists and dicts that are loaded with as many items as were saved."""

    def __init__(self, request: LoadRequest, stored: StoredState) -> None:
        self._request, self._stored = request, stored
        self._stored_names = sorted({*stored.values, *stored.tensors})
        self._state_names = sorted(request.values)
        self.values = frozenset(stored.values)
        self.reads: list[ValueRead] = []
        self.covered: set[str] = set()
        """The state's names in them: nothing is read for these."""
        self.mismatched: dict[str, str] = {}

    def match(self, fqn: str, part: Resizable) -> None:
        """Add the read of a part, if it is to be read as a whole."""
        below = list(_list_below(self._stored_names, fqn))
        if fqn in self.values:
            self._cover(fqn)
            self.reads.append(ValueRead(fqn=fqn, stored_names=(fqn,)))
        elif fqn in self._stored.tensors or (not below and self._is_in_value(part.path)):
            # Matched by its own name, or read from the value around it.
            return
        elif all(name in self.values and parse_stored_name(name) is None for name in below):
            self._match_entries(fqn, part, below)

    def _match_entries(self, fqn: str, part: Resizable, below: Sequence[str]) -> None:
        """Add the read of a part that was saved entry by entry, even if it had no entry, as an empty dict."""
        is_list = part.length is not None
        items = {name[len(fqn) + 1 :].partition(".")[0] for name in below}
        if is_list and not all(map(str.isdecimal, items)):
            # It is a dict in the checkpoint. Matching name by name reports that.
            return
        paths = _select_paths(self._stored.read_paths(), part.path)
        marks = paths.keys() - self.values
        if not below and not paths:
            # The checkpoint has nothing of it.
            return
        # An empty path is the mark of an empty dict. Keys of a dict may be numbers as text.
        if is_list and not all(path and isinstance(path[0], int) for path in paths.values()):
            self.mismatched[fqn] = "a dict in the checkpoint, a list in the state"
            self._cover(fqn)
            return
        n_stored = max((int(item) + 1 for item in items), default=0) if is_list else None
        if is_list and n_stored == part.length and marks <= set(self._request.marks):
            # As many items, and no other kinds of keys or empty dicts in them: they are matched name by name.
            return
        self._cover(fqn)
        foreign = sorted(str(paths[name][-1]) for name in marks if is_mark_of_foreign_key(name))
        if not paths.keys() >= set(below):
            self.mismatched[fqn] = (
                "saved entry by entry, by a writer that didn't store which keys lead to each. Load it with as many "
                "items as it was saved with"
            )
        elif foreign:
            self.mismatched[fqn] = (
                f"saved with keys that can't be rebuilt from their text: {', '.join(foreign[:8])}. Use str, int or "
                "another plain scalar, or tuples of them"
            )
        else:
            self.reads.append(ValueRead(fqn=fqn, stored_names=tuple(below), paths=paths))

    def _cover(self, fqn: str) -> None:
        self.covered.update((fqn, *_list_below(self._state_names, fqn)))

    def _is_in_value(self, path: Path) -> bool:
        """Return whether a list or dict around the part is one value, as older writers store those without tensors."""
        return any(join_path(path[:length]) in self.values for length in range(1, len(path)))


def _select_paths(paths: Mapping[str, Path], path: Path) -> dict[str, Path]:
    """Return the paths below this one, without it, and the mark of an empty dict there."""
    return {
        name: each[len(path) :]
        for name, each in paths.items()
        if each[: len(path)] == path and (len(each) > len(path) or is_mark_of_empty(name))
    }


def _list_below(names: Sequence[str], fqn: str) -> Iterator[str]:
    """Yield the names below this one. `names` are sorted."""
    prefix = f"{fqn}."
    for index in range(bisect_left(names, prefix), len(names)):
        if not names[index].startswith(prefix):
            return
        yield names[index]
