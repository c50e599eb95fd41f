"""Judge copies of tensors that differ between ranks: write the first rank's, or refuse the save. Pure.

Copies that only drifted apart are written from the first rank, and so are entries of dicts: any rank's values will do.
Parameters and optimizer state that differ by more are not copies of one tensor, and one of them would be lost.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from typing_extensions import override

from stepkeeper_planners.errors import RanksDifferError, format_ranks, shorten
from stepkeeper_planners.geometry.layout import Chunk, Owner, TensorLayout
from stepkeeper_planners.saving.copies import sample_copy
from stepkeeper_planners.state.parameter_names import find_optimizers
from stepkeeper_planners.state.tree import FlatState, join_path

__all__ = ["CopyRules", "CopyVerdict", "Groups"]

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

    @classmethod
    def without_judgement(cls, differing: Sequence[tuple[str, Groups]]) -> "CopyVerdict":
        """Name the tensors only. See `CopyRules.judge`."""
        ranks: dict[str, set[int]] = {}
        for name, groups in differing:
            ranks.setdefault(name, set()).update(*groups[1:])
        return cls(ranks={name: sorted(those) for name, those in ranks.items()}, reasons={}, first=())

    def raise_refusal(self) -> None:
        """Raise RanksDifferError if the save is refused."""
        if self.reasons:
            ranks = {name: self.ranks[name] for name in self.reasons}
            raise RanksDifferError(reasons=self.reasons, ranks=ranks)

    def warn(self) -> str:
        """Return a warning that the first rank's copies are saved."""
        return (
            f"{self}. The first rank's copies are saved, and from now on all of {shorten(self.first)} is. If each rank "
            "has its own, save them as PerRank(value)"
        )

    @override
    def __str__(self) -> str:
        """Return the difference for people."""
        ranks = sorted({rank for those in self.ranks.values() for rank in those})
        return (
            f"the copies of {len(self.ranks)} tensors on {format_ranks(ranks)} differ from the first rank's: "
            f"{shorten(self.ranks)}"
        )


class CopyRules:
    """Decide which tensors of one state are divided among the ranks that hold copies, and judge copies that differ."""

    def __init__(self, flat: FlatState, first: Iterable[str] = (), *, all_first: bool = False) -> None:
        """Make the rules for a state.

        `first` names the modules, optimizers and entries of it that the first rank writes; with `all_first` it
        writes everything that it holds.
        """
        self._flat: Final = flat
        self._buffers: Final = frozenset(
            join_path((*path, *(part for part in name.split(".") if part not in _LEFT_OUT)))
            for path, module in flat.modules
            for name, _ in module.named_buffers(remove_duplicate=False)
        )
        self._objects: Final = {join_path(path) for path, _ in flat.modules} | find_optimizers(flat.paths)
        self._narrowed: Final[dict[int, tuple[Owners, Owners]]] = {}
        self._first: Final = frozenset(first)
        self._all_first: Final = all_first

    def restrict(self, layout: TensorLayout) -> TensorLayout:
        """Return the layout, without the copies on other ranks than the first if the tensor isn't to be divided.

        Buffers never are: in a module that torch's DistributedDataParallel wraps, each rank has its own statistics.
        """
        name = layout.fqn
        if not (
            self._all_first or name in self._buffers or (self._first and self._find_unit(name) in self._first)
        ):
            return layout
        chunks = []
        for chunk in layout.chunks:
            # There are few kinds of owners, and their tuples are shared.
            if id(chunk.owners) not in self._narrowed:
                rank = min(owner.rank for owner in chunk.owners)
                first = tuple(owner for owner in chunk.owners if owner.rank == rank)
                # With the owners themselves, whose number no other ones get then.
                self._narrowed[id(chunk.owners)] = chunk.owners, first
            chunks.append(Chunk(box=chunk.box, owners=self._narrowed[id(chunk.owners)][1]))
        return replace(layout, chunks=tuple(chunks), mesh_slices=())

    def sample(self, name: str) -> list[float]:
        """Return the result of `sample_copy` for a tensor of the state."""
        return sample_copy(self._flat.tensors[name])

    def judge(
        self,
        differing: Sequence[tuple[str, Groups]],
        samples: Sequence[Mapping[str, Sequence[float]]],
        parties: Sequence[Sequence[int]] = (),
    ) -> CopyVerdict:
        """Judge the tensors whose copies differ.

        Args:
            differing: the name of each chunk of which there are different copies, and the ranks by equal copies.
            samples: the results of `sample` by rank and name, of the first rank of each group.
            parties: the ranks that have the same names, if not all have. An entry of a dict that several parties have
                is judged as a parameter is: no rank has the whole state, so none has all of its copies.
        """
        reasons: dict[str, str] = {}
        for name, groups in differing:
            first, *others = (samples[group[0]][name] for group in groups)
            is_near = all(_is_near(first, other) for other in others)
            is_split = sum(any(rank in group for group in groups for rank in party) for party in parties) > 1
            if self._is_exact(name):
                reasons[name] = _OWN_VALUE
            elif not is_near and (is_split or self._find_unit(name) in self._objects):
                reasons[name] = _NO_COPY
        verdict = CopyVerdict.without_judgement(differing)
        return replace(verdict, reasons=reasons, first=sorted({*map(self._find_unit, verdict.ranks)}))

    def _is_exact(self, name: str) -> bool:
        """Return whether no copy stands for another: integers in dicts are random numbers, or positions."""
        tensor = self._flat.tensors[name]
        return not (
            tensor.is_floating_point() or tensor.is_complex() or self._find_unit(name) in self._objects
        )

    def _find_unit(self, name: str) -> str:
        """Return the module or optimizer that a tensor is of, or else the entry of the state that it is in."""
        parts = name.split(".")
        above = (".".join(parts[:end]) for end in range(len(parts), -1, -1))
        return next((key for key in above if key in self._objects), parts[0])


def _is_near(one: Sequence[float], other: Sequence[float]) -> bool:
    (norm, other_norm), *elements = zip(one, other, strict=True)
    apart = math.hypot(*(mine - theirs for mine, theirs in elements))
    length = max(
        math.hypot(*side) for side in ([mine for mine, _ in elements], [theirs for _, theirs in elements])
    )
    return abs(norm - other_norm) <= _NEAR * max(norm, other_norm) and apart <= _NEAR * length
