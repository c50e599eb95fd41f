"""Compare the copies that ranks hold, and judge those that differ: write the first rank's, or refuse the save.

Copies that only drifted apart are written from the first rank, and so are entries of dicts: any rank's values will do.
Parameters and optimizer state that differ by more are not copies of one tensor, and one of them would be lost.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from typing_extensions import override

from stepkeeper_planners.errors import RanksDifferError, format_ranks, shorten
from stepkeeper_planners.geometry.layout import Chunk, Owner, TensorLayout
from stepkeeper_planners.saving.copies import CopyDigests, sample_copy
from stepkeeper_planners.state.parameter_names import find_optimizers
from stepkeeper_planners.state.tree import FlatState, join_path

__all__ = [
    "Answer",
    "CopyVerdict",
    "Groups",
    "compare_copies",
    "find_buffers",
    "group_ranks",
    "keep_first_copies",
]

_MAX_COMPARED: Final = 8
"""The most different copies of one chunk of which tensors are named and judged at once."""

_NEAR: Final = 0.01
"""The largest part of a norm by which copies may differ that have drifted apart."""

_OWN_VALUE: Final = (
    "another value than on the other ranks; if each rank has its own, save it as PerRank(value)"
)
_NO_COPY: Final = (
    "no copy of the first rank's tensor, and more than drift. If each rank has its own, save it as PerRank(value), or "
    "name it by rank; if ranks hold parts of one tensor, make it a DTensor; if other processes train together, pass "
    "their process group. CheckpointManager's Options(replicas=\"first\") saves the first rank's"
)

_LEFT_OUT: Final = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""The attributes of a module that its state_dict() leaves out of the names."""

Owners = tuple[Owner, ...]
Groups = list[list[int]]
"""Ranks with equal copies. The group of the first rank that holds one comes first."""

Answer = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]
"""Makes an answer for all ranks from their values."""


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
        layout._replace(chunks=tuple(map(narrow, layout.chunks)), mesh_slices=())
        if layout.fqn in names or layout.fqn in first or layout.fqn.startswith(above)
        else layout
        for layout in layouts
    ]


def group_ranks(digests: Sequence[Mapping[str, str]]) -> dict[str, Groups]:
    """Group the ranks by equal digests, for each key under which they differ. The first rank's group comes first.

    `digests` has those of each rank by key. A rank may lack some keys.
    """
    found: dict[str, dict[str, list[int]]] = {}
    for rank, own in enumerate(digests):
        for key, digest in own.items():
            found.setdefault(key, {}).setdefault(digest, []).append(rank)
    return {key: list(groups.values()) for key, groups in found.items() if len(groups) > 1}


def compare_copies(
    differing: Mapping[str, Groups],
    digests: CopyDigests,
    flat: FlatState,
    rank: int,
    exchange: Callable[[str, Mapping[str, Any], Answer], Mapping[str, Any]],
    *,
    parties: Sequence[Sequence[int]] = (),
) -> CopyVerdict | None:
    """Find tensors of `flat` whose copies differ, and judge them. All ranks call this.

    Call it until it finds none: it looks at a few of the different copies.

    Args:
        differing: the result of `group_ranks` for the combined digests of all ranks.
        digests: this rank's.
        flat: this rank's state. All ranks have the same layouts for the names that they share.
        rank: this rank.
        exchange: gives all ranks the answer to their values; each exchange has a name.
        parties: the ranks that have the same names, if not all have. An entry of a dict that several parties have is
            judged as a parameter is: no rank has the whole state, so none has all of its copies.

    Returns:
        The same verdict on all ranks; None if no copies differ.

    Raises:
        RanksDifferError: the save is refused. All ranks raise it.
    """
    if not differing:
        return None
    of_group = {
        key: {group[0]: group for group in groups[:_MAX_COMPARED]} for key, groups in differing.items()
    }

    def find_names(reports: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return {
            "found": [
                (name, [[rank for first in firsts for rank in asked[first]] for firsts in groups])
                for key, asked in of_group.items()
                for name, groups in group_ranks([report.get(key, {}) for report in reports]).items()
            ]
        }

    own = {key: digests.list_names(key, flat.tensors) for key, asked in of_group.items() if rank in asked}
    found: list[tuple[str, Groups]] = exchange("names", own, find_names)["found"]
    if not found:
        return None
    sample = _make_sampler(flat)
    samples = {name: sample(name) for name, groups in found if rank in {group[0] for group in groups}}
    verdict = CopyVerdict(**exchange("samples", samples, lambda those: asdict(_judge(found, those, parties))))
    if verdict.reasons:
        refused = {name: verdict.ranks[name] for name in verdict.reasons}
        raise RanksDifferError(reasons=verdict.reasons, ranks=refused)
    return verdict


def _make_sampler(flat: FlatState) -> Callable[[str], Mapping[str, Any]]:
    """Make the function that returns what `_judge` needs to know of this rank's copy of a tensor."""
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


def _judge(
    differing: Sequence[tuple[str, Groups]],
    samples: Sequence[Mapping[str, Mapping[str, Any]]],
    parties: Sequence[Sequence[int]],
) -> CopyVerdict:
    """Judge the chunks whose copies differ, by the samples of the first rank of each group."""
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
