"""Match lists and dicts of values that may have other items in the checkpoint than in the state now."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stepkeeper_planners.loading.load_request import LoadRequest, Path
from stepkeeper_planners.loading.selection import LoadRules
from stepkeeper_planners.loading.state_reads import ValueRead
from stepkeeper_planners.loading.stored_state import StoredState
from stepkeeper_planners.state.per_rank import parse_stored_name
from stepkeeper_planners.state.resizable import Resizable

__all__ = ["ResizedReads", "match_resizable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizedReads:
    """The reads of lists and dicts that are loaded with as many items as were saved."""

    reads: Sequence[ValueRead] = ()
    names: frozenset[str] = frozenset()
    """The state's names in them: nothing is read for these."""
    mismatched: Mapping[str, str] = field(default_factory=dict)


def match_resizable(request: LoadRequest, stored: StoredState, rules: LoadRules) -> ResizedReads:
    """Find the lists and dicts of the state that are to be read as a whole.

    A part that is one value on both sides isn't among them, nor a list that has as many items on both sides, nor one
    that was saved with tensors or ranks' own values in it: those are matched name by name, as everything else.

    Args:
        request: what the state asks for.
        stored: what the checkpoint has.
        rules: which names are loaded.
    """
    if not request.resizable:
        return ResizedReads()
    names = sorted({*stored.values, *stored.tensors})
    wanted = sorted(request.values)
    values = frozenset(stored.values)
    reads: list[ValueRead] = []
    covered: set[str] = set()
    mismatched: dict[str, str] = {}
    for fqn, part in request.resizable.items():
        if not rules.selects(fqn) or (fqn in request.values and fqn in values):
            continue
        below = list(_list_below(names, fqn))
        if fqn in values:
            read = ValueRead(fqn=fqn, stored_names=(fqn,))
        elif not _is_read_whole(fqn, part, below, values):
            continue
        else:
            paths = _select_paths(stored.read_paths(), part.path)
            if not paths.keys() >= set(below):
                mismatched[fqn] = (
                    "saved entry by entry, by a writer that didn't store which keys lead to each. Load it with as many "
                    "items as it was saved with"
                )
                covered.update((fqn, *_list_below(wanted, fqn)))
                continue
            read = ValueRead(fqn=fqn, stored_names=tuple(below), paths=paths)
        reads.append(read)
        covered.update((fqn, *_list_below(wanted, fqn)))
    return ResizedReads(reads=reads, names=frozenset(covered), mismatched=mismatched)


def _is_read_whole(fqn: str, part: Resizable, below: Sequence[str], values: frozenset[str]) -> bool:
    if not below or not all(name in values and parse_stored_name(name) is None for name in below):
        return False
    if part.length is None:
        return True
    items = {name[len(fqn) + 1 :].partition(".")[0] for name in below}
    if not all(map(str.isdecimal, items)):
        # It is a dict in the checkpoint.
        return False
    return max(map(int, items)) + 1 != part.length


def _select_paths(paths: Mapping[str, Path], path: Path) -> dict[str, Path]:
    """Return the paths below this one, without it."""
    return {
        name: each[len(path) :]
        for name, each in paths.items()
        if len(each) > len(path) and each[: len(path)] == path
    }


def _list_below(names: Sequence[str], fqn: str) -> Iterator[str]:
    """Yield the names below this one. `names` are sorted."""
    prefix = f"{fqn}."
    for index in range(bisect_left(names, prefix), len(names)):
        if not names[index].startswith(prefix):
            return
        yield names[index]
