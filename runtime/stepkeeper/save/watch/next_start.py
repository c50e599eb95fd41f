"""Foresee whether a restore of the next start takes what is saved now, by the rules that the restore goes by."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from stepkeeper.save.snapshot.plan import SnapshotPlan
from stepkeeper_planners.dtypes import dtype_name
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks, whole_tensor
from stepkeeper_planners.loading.differences import Differences
from stepkeeper_planners.loading.load_request import LoadRequest
from stepkeeper_planners.loading.matching import compare
from stepkeeper_planners.loading.stored_state import StoredState, StoredTensor
from stepkeeper_planners.state.nesting import encode_nesting, is_mark_of_empty
from stepkeeper_planners.state.per_rank import stored_name
from stepkeeper_planners.state.resizable import Resizable
from stepkeeper_planners.state.tree import FlatState, Path, join_path

__all__ = ["Outline", "foresee"]

_Form = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The names in a state, and the form of each entry."""

    tensors: Mapping[str, _Form]
    """The dtype and shape of each tensor, under the first of its names."""

    aliases: Mapping[str, str]
    """Further names of tied tensors, each with the first one."""

    values: Mapping[str, Path]
    per_rank: frozenset[str]
    paths: Mapping[str, Path]
    """The keys that lead to each name, and the marks of keys and empty dicts."""

    @classmethod
    def of_state(cls, flat: FlatState) -> Self:
        """Outline a state."""
        return cls(
            tensors={
                name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in flat.tensors.items()
            },
            aliases=flat.aliases,
            values={name: flat.paths[name] for name in flat.values},
            per_rank=frozenset(flat.per_rank),
            paths=flat.paths | encode_nesting(flat.tree),
        )

    @classmethod
    def of_plan(cls, plan: SnapshotPlan) -> Self:
        """Outline the states that a plan is for."""
        tensors = {each.fqn: (each.dtype, each.global_shape) for each in plan.layouts}
        aliases = plan.structure.aliases
        paths = {name: tuple(path) for name, path in json.loads(plan.structure.key_paths).items()}
        others = plan.names.difference(tensors, aliases, plan.per_rank)
        return cls(
            tensors=tensors,
            aliases=aliases,
            values={name: paths[name] for name in others},
            per_rank=plan.per_rank,
            paths=paths,
        )

    @property
    def names(self) -> frozenset[str]:
        """The names of everything in the state."""
        return frozenset((*self.tensors, *self.aliases, *self.values, *self.per_rank))


def foresee(start: Outline, resizable: Mapping[str, Resizable], saved: Outline, ranks: Ranks) -> Differences:
    """Find what a restore would refuse of a commit, into a state as it was at the start of this process.

    Args:
        start: The state at the start.
        resizable: Its parts that take back any number of items, as they were at the start.
        saved: The state that is saved.
        ranks: This rank, and how many there are.

    Returns:
        The differences: what is missing in the commit, what is unexpected there, and what is of another kind.

    """
    same = _list_same_tensors(start, saved)
    mine = {name: form for name, form in start.tensors.items() if name not in same}
    request = LoadRequest(
        layouts=[whole_tensor(name, dtype, shape, ranks) for name, (dtype, shape) in mine.items()],
        values=start.values,
        aliases={name: first for name, first in start.aliases.items() if first in mine},
        per_rank=dict.fromkeys(start.per_rank - saved.per_rank),
        containers=frozenset(
            _list_containers(path for name, path in start.paths.items() if name not in same)
        ),
        resizable=resizable,
        marks=start.paths.keys(),
    )
    stored = StoredState(
        tensors={
            name: StoredTensor(dtype=form[0], global_shape=form[1], boxes=(Box.whole(form[1]),), data=first)
            for name, first in ((each, saved.aliases.get(each, each)) for each in saved.paths)
            if name not in same and (form := saved.tensors.get(first)) is not None
        },
        values=(*saved.values, *(stored_name(name, ranks) for name in saved.per_rank - start.per_rank)),
        read_paths=lambda: saved.paths,
    )
    _, differences = compare(request, stored, ranks)
    return _add_empty_dicts(_add_containers(differences, request, saved), start, resizable, saved)


def _list_same_tensors(start: Outline, saved: Outline) -> frozenset[str]:
    """List the tensors that are alike on both sides and tied on neither. There may be very many of them."""
    tied = {*start.aliases, *start.aliases.values(), *saved.aliases, *saved.aliases.values()}
    return frozenset(
        name for name, form in start.tensors.items() if saved.tensors.get(name) == form and name not in tied
    )


def _list_containers(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        yield from (join_path(path[:length]) for length in range(1, len(path)))


def _add_containers(differences: Differences, request: LoadRequest, saved: Outline) -> Differences:
    """Add dicts of the start in whose place a value is saved: the values in them aren't found in that one."""
    replaced = saved.values.keys() & set(request.containers) - request.resizable.keys()
    if not replaced:
        return differences
    reasons = dict.fromkeys(replaced, "a plain value in the checkpoint, a dict or list in the state")
    return Differences(
        missing=differences.missing,
        unexpected=differences.unexpected,
        mismatched={**differences.mismatched, **reasons},
    )


def _add_empty_dicts(
    differences: Differences, start: Outline, resizable: Mapping[str, Resizable], saved: Outline
) -> Differences:
    """Add empty dicts that are saved in a dict of the start that isn't empty: a restore doesn't make them there."""
    new = (path for name, path in saved.paths.items() if is_mark_of_empty(name) and name not in start.paths)
    left_out = {
        join_path(path): "an empty dict, which the next start's restore leaves out"
        for path in new
        if not any(join_path(path[:length]) in resizable for length in range(1, len(path) + 1))
    }
    if not left_out:
        return differences
    return Differences(
        missing=differences.missing,
        unexpected=differences.unexpected,
        mismatched={**left_out, **differences.mismatched},
    )
