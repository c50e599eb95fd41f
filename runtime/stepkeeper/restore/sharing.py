"""Who reads which block: each is read once, by one of those that need it, and sent to the others. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from stepkeeper.restore.blocks import BlockTable, Runs, numbers_of, runs_of

__all__ = ["Duties", "Group", "Sharing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Blocks that the same ranks need, two at least."""

    ranks: tuple[int, ...]
    blocks: Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Duties:
    """What one rank does for itself and for the others."""

    reads: Mapping[int, tuple[int, ...]]
    """The blocks that it reads, each with the ranks it sends it to."""

    receives: Mapping[int, int]
    """The blocks that it is sent, each with who sends it."""

    @property
    def partners(self) -> set[int]:
        """The ranks that it sends to or is sent by."""
        return {rank for ranks in self.reads.values() for rank in ranks} | set(self.receives.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What several ranks need. Short where they need little or all in common; the same on all ranks."""

    groups: tuple[Group, ...]
    alone_bytes: tuple[int, ...]
    """By rank, what only it needs."""

    @classmethod
    def of(cls, needs: Sequence[Runs], table: BlockTable) -> Self:
        """`needs` are the blocks that each rank needs, by rank."""
        blocks_of: dict[tuple[int, ...], list[int]] = {}
        alone_bytes = [0] * len(needs)
        for first, end, ranks in _stretches(needs):
            if len(ranks) == 1:
                alone_bytes[ranks[0]] += table.size_bytes(range(first, end))
            elif ranks:
                blocks_of.setdefault(ranks, []).extend(range(first, end))
        groups = tuple(
            Group(ranks=ranks, blocks=runs_of(blocks)) for ranks, blocks in sorted(blocks_of.items())
        )
        return cls(groups=groups, alone_bytes=tuple(alone_bytes))

    def duties(self, rank: int, needs: Collection[int], table: BlockTable, order: Sequence[int]) -> Duties:
        """What this rank, which needs these blocks, does; `order` is that of all blocks: ranks compute from the same.

        Ranks that have least to read by themselves read most of what several need.
        """
        ranks_of = {number: group.ranks for group in self.groups for number in numbers_of(group.blocks)}
        arrays = {group.ranks: np.array(group.ranks) for group in self.groups}
        loads = np.array(self.alone_bytes, dtype=np.int64)
        reads: dict[int, tuple[int, ...]] = {}
        receives: dict[int, int] = {}
        own = set(needs)
        for number in order:
            ranks = ranks_of.get(number)
            if ranks is None:
                if number in own:
                    reads[number] = ()
                continue
            candidates = arrays[ranks]
            reader = int(candidates[loads[candidates].argmin()])
            loads[reader] += table.blocks[number].size_bytes
            if reader == rank:
                reads[number] = tuple(other for other in ranks if other != rank)
            elif number in own:
                receives[number] = reader
        return Duties(reads=reads, receives=receives)

    def said(self) -> dict[str, Any]:
        """As other ranks can be told it."""
        return {
            "groups": [{"ranks": runs_of(group.ranks), "blocks": group.blocks} for group in self.groups],
            "alone_bytes": list(self.alone_bytes),
        }

    @classmethod
    def heard(cls, said: Mapping[str, Any]) -> Self:
        """What `said` was made of."""
        return cls(
            groups=tuple(
                Group(ranks=tuple(numbers_of(group["ranks"])), blocks=group["blocks"])
                for group in said["groups"]
            ),
            alone_bytes=tuple(said["alone_bytes"]),
        )


def _stretches(needs: Sequence[Runs]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Neighbouring blocks that the same ranks need: first, the one behind the last, and those ranks."""
    changes: dict[int, list[tuple[int, bool]]] = {}
    for rank, runs in enumerate(needs):
        for first, end in runs:
            changes.setdefault(first, []).append((rank, True))
            changes.setdefault(end, []).append((rank, False))
    stretches = []
    present: set[int] = set()
    places = sorted(changes)
    for place, following in pairwise(places):
        for rank, comes in changes[place]:
            (present.add if comes else present.discard)(rank)
        stretches.append((place, following, tuple(sorted(present))))
    return stretches
