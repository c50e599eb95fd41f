"""Judge copies of tensors that differ between ranks: write the first rank's, or refuse the save. Pure.

Copies that only drifted apart are written from the first rank, and so are entries of dicts: any rank's values will do.
Parameters and optimizer state that differ by more are not copies of one tensor, and one of them would be lost.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from typing_extensions import override

from stepkeeper_planners.errors import format_ranks, shorten
from stepkeeper_planners.geometry.layout import Chunk, Owner, TensorLayout
from stepkeeper_planners.saving.copies import sample_copy
from stepkeeper_planners.state.parameter_names import find_optimizers
from stepkeeper_planners.state.tree import FlatState, join_path

__all__ = [
    "CopyVerdict",
    "Groups",
    "find_buffers",
    "judge",
    "keep_first_copies",
    "make_sampler",
]

_NEAR: Final = 0.01
"""The largest part of a norm by which copies may differ that have drifted apart."""

_OWN_VALUE: Final = (
    "another value than on the other ranks; if each rank has its own, save it as PerRank(value)"
)
_NO_COPY: Final = (
    "no copy of the first rank's tensor, and more than drift. If each rank has its own, save it as PerRank(value), or "
    "name it by rank; if ranks hold parts of one tensor, make it a DTensor; if other processes train together, pass "
    'their process group. Options(replicas="first") saves the first rank\'s'
)

_LEFT_OUT: Final = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""The attributes of a module that its state_dict() leaves out of the names."""

Owners = tuple[Owner, ...]
Groups = list[list[int]]
"""Ranks with equal copies. The group of the first rank that holds one comes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyVerdict:
    """The answer for copies that differ."""

    ranks: Mapping[str, Sequence[int]]
    """For each tensor whose copies differ, the ranks whose copy isn't the first rank's."""

    reasons: Mapping[str, str]
    """For each tensor for which the save is refused, in which way its copies differ."""

    first: Sequence[str]
    """The modules, optimizers and entries of the state of which the first rank writes all tensors."""

    @override
    def __str__(self) -> str:
        """Return a warning that the first rank's copies are saved."""
        ranks = sorted({rank for those in self.ranks.values() for rank in those})
        return (
            f"the copies of {len(self.ranks)} tensors on {format_ranks(ranks)} differ from the first rank's: "
            f"{shorten(self.ranks)}. The first rank's copies are saved, and from now on all of {shorten(self.first)} "
            "is. If each rank has its own, save them as PerRank(value)"
        )


def find_buffers(flat: FlatState) -> frozenset[str]:
    """Find the names of the buffers of a state's modules.

    Under torch's DistributedDataParallel each rank has its own, such as the statistics of BatchNorm.
    """
    return frozenset(
        join_path((*path, *(part for part in name.split(".") if part not in _LEFT_OUT)))
        for path, module in flat.modules
        for name, _ in module.named_buffers(remove_duplicate=False)
    )


def keep_first_copies(
    layouts: Iterable[TensorLayout], first: Collection[str], names: Collection[str] = ()
) -> list[TensorLayout]:
    """Leave out the copies on other ranks than the first of these names, and of all that is below `first`.

    All ranks must pass the same. "" is above everything.
    """
    narrowed: dict[int, tuple[Owners, Owners]] = {}

    def narrow(chunk: Chunk) -> Chunk:
        # There are few kinds of owners, and their tuples are shared.
        if id(chunk.owners) not in narrowed:
            rank = min(owner.rank for owner in chunk.owners)
            kept = tuple(owner for owner in chunk.owners if owner.rank == rank)
            # With the owners themselves, whose number no other ones get then.
            narrowed[id(chunk.owners)] = chunk.owners, kept
        return Chunk(box=chunk.box, owners=narrowed[id(chunk.owners)][1])

    above = tuple(f"{each}." if each else "" for each in first)
    return [
        replace(layout, chunks=tuple(map(narrow, layout.chunks)), mesh_slices=())
        if layout.fqn in names or layout.fqn in first or layout.fqn.startswith(above)
        else layout
        for layout in layouts
    ]


def make_sampler(flat: FlatState) -> Callable[[str], Mapping[str, Any]]:
    """Make the function that samples this rank's copy of a tensor: what `judge` needs to know of it."""
    objects = {join_path(path) for path, _ in flat.modules} | find_optimizers(flat.paths)

    def sample(name: str) -> dict[str, Any]:
        parts = name.split(".")
        above = (".".join(parts[:end]) for end in range(len(parts), -1, -1))
        unit = next((each for each in above if each in objects), None)
        tensor = flat.tensors[name]
        is_whole_numbers = not (tensor.is_floating_point() or tensor.is_complex())
        return {
            "unit": parts[0] if unit is None else unit,
            "is_state": unit is not None,
            # Random numbers, or positions: no copy stands for another.
            "is_exact": unit is None and is_whole_numbers,
            "numbers": sample_copy(tensor),
        }

    return sample


def judge(
    differing: Sequence[tuple[str, Groups]],
    samples: Sequence[Mapping[str, Mapping[str, Any]]],
    parties: Sequence[Sequence[int]] = (),
) -> CopyVerdict:
    """Judge the tensors whose copies differ.

    Args:
        differing: the name of each chunk of which there are different copies, and the ranks by equal copies.
        samples: the samples by rank and name, of the first rank of each group.
        parties: the ranks that have the same names, if not all have. An entry of a dict that several parties have is
            judged as a parameter is: no rank has the whole state, so none has all of its copies.
    """
    reasons: dict[str, str] = {}
    units: set[str] = set()
    ranks: dict[str, set[int]] = {}
    for name, groups in differing:
        first, *others = (samples[group[0]][name] for group in groups)
        is_split = sum(any(rank in group for group in groups for rank in party) for party in parties) > 1
        units.add(first["unit"])
        ranks.setdefault(name, set()).update(*groups[1:])
        if first["is_exact"]:
            reasons[name] = _OWN_VALUE
        elif (is_split or first["is_state"]) and not all(
            _is_near(first["numbers"], other["numbers"]) for other in others
        ):
            reasons[name] = _NO_COPY
    return CopyVerdict(
        ranks={name: sorted(those) for name, those in ranks.items()}, reasons=reasons, first=sorted(units)
    )


def _is_near(one: Sequence[float], other: Sequence[float]) -> bool:
    (norm, other_norm), *elements = zip(one, other, strict=True)
    apart = math.hypot(*(mine - theirs for mine, theirs in elements))
    length = max(
        math.hypot(*side) for side in ([mine for mine, _ in elements], [theirs for _, theirs in elements])
    )
    return abs(norm - other_norm) <= _NEAR * max(norm, other_norm) and apart <= _NEAR * length
