"""Assign blocks to ranks: each block is read once, by one of the ranks that need it, and sent to the others. Pure."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Self

import numpy as np

from stepkeeper.checkpoint.blocks import BlockTable, Runs, decode_runs, encode_runs

__all__ = ["Duties", "Group", "Sharing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Blocks that the same ranks need; at least two ranks do."""

    ranks: tuple[int, ...]
    blocks: Runs
    readers: tuple[int, ...]
    """The ranks among them that have copies at hand, or all of them if none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duties:
    """The blocks that one rank reads for itself and for others, and those that it is sent."""

    reads: Mapping[int, tuple[int, ...]]
    """The blocks that it reads, each with the ranks that it sends it to."""

    receives: Mapping[int, int]
    """The blocks that it is sent, each with the rank that sends it."""

    @property
    def partners(self) -> set[int]:
        """The ranks that it sends to or receives from."""
        return {rank for ranks in self.reads.values() for rank in ranks} | set(self.receives.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The blocks that several ranks need, the same on all ranks. It has few groups where they share little or all."""

    groups: tuple[Group, ...]
    alone_bytes: tuple[int, ...]
    """The bytes of blocks that only one rank needs, by rank."""

    @classmethod
    def of(cls, needs: Sequence[Runs], table: BlockTable, at_hand: Sequence[Runs] = ()) -> Self:
        """Find out which blocks several ranks need. `at_hand` has those that each has copies of."""
        blocks_of: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        alone_bytes = [0] * len(needs)
        for first, end, ranks, readers in _stretches(needs, at_hand):
            if len(ranks) == 1:
                alone_bytes[ranks[0]] += table.size_bytes(range(first, end))
            elif ranks:  # else no rank needs these blocks
                blocks_of.setdefault((ranks, readers or ranks), []).extend(range(first, end))
        groups = tuple(
            Group(ranks=ranks, blocks=encode_runs(blocks), readers=readers)
            for (ranks, readers), blocks in sorted(blocks_of.items())
        )
        return cls(groups=groups, alone_bytes=tuple(alone_bytes))

    def assign_duties(
        self, rank: int, needs: Collection[int], table: BlockTable, order: Sequence[int]
    ) -> Duties:
        """Compute the blocks that this rank reads, sends and receives.

        All ranks compute from the same values, so their duties agree. Those that have least to read for
        themselves read most of the shared blocks. `order` is that of all blocks.
        """
        group_of = {number: group for group in self.groups for number in decode_runs(group.blocks)}
        arrays = {group.readers: np.array(group.readers) for group in self.groups}
        loads = np.array(self.alone_bytes, dtype=np.int64)
        reads: dict[int, tuple[int, ...]] = {}
        receives: dict[int, int] = {}
        own = set(needs)
        for number in order:
            group = group_of.get(number)
            if group is None:
                if number in own:
                    reads[number] = ()
                continue
            candidates = arrays[group.readers]
            reader = int(candidates[loads[candidates].argmin()])
            loads[reader] += table.blocks[number].size_bytes
            if reader == rank:
                reads[number] = tuple(other for other in group.ranks if other != rank)
            elif number in own:
                receives[number] = reader
        return Duties(reads=reads, receives=receives)

    def encode(self) -> dict[str, Any]:
        """Encode this as plain JSON values for the other ranks."""
        groups = [(encode_runs(each.ranks), each.blocks, encode_runs(each.readers)) for each in self.groups]
        return {"groups": groups, "alone_bytes": list(self.alone_bytes)}

    @classmethod
    def decode(cls, message: Mapping[str, Any]) -> Self:
        """Decode the result of `encode`."""
        groups = (
            Group(ranks=tuple(decode_runs(ranks)), blocks=blocks, readers=tuple(decode_runs(readers)))
            for ranks, blocks, readers in message["groups"]
        )
        return cls(groups=tuple(groups), alone_bytes=tuple(message["alone_bytes"]))


def _stretches(
    needs: Sequence[Runs], at_hand: Sequence[Runs]
) -> Iterator[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Yield ranges of blocks that the same ranks need: first, end, the ranks, and those with copies."""
    # At the first block of each run, and after its last one, the rank enters or leaves one of these sets.
    needing: set[int] = set()
    having: set[int] = set()
    changes: dict[int, list[Callable[[], None]]] = {}
    for present, by_rank in ((needing, needs), (having, at_hand)):
        for rank, runs in enumerate(by_rank):
            for first, end in runs:
                changes.setdefault(first, []).append(partial(present.add, rank))
                changes.setdefault(end, []).append(partial(present.discard, rank))
    for place, following in pairwise(sorted(changes)):
        for change in changes[place]:
            change()
        yield place, following, tuple(sorted(needing)), tuple(sorted(needing & having))
