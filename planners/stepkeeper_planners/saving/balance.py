"""The most even shares: what each holder of shared bytes writes, so that the heaviest writes as little as possible.

Groups of bytes may overlap in any way, so evening out one group after the other is not enough: bytes that a full rank
gives away may have to pass through others. Solved as a flow, in whole bytes, so that every rank gets the same answer.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Bytes that these ranks, sorted, all hold: any of them may write any part of them."""

    holders: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of each group what each holder writes, and the heaviest load that results: none lower is possible."""

    of_groups: tuple[dict[int, int], ...]
    heaviest_bytes: int


def level_shares(groups: Sequence[Group], fixed_bytes: Sequence[int]) -> Shares:
    """The shares with the lowest heaviest load, on top of `fixed_bytes` that each rank writes anyway."""
    loads = list(fixed_bytes)
    shares: list[dict[int, int]] = [{} for _ in groups]
    # Innermost first: where groups are nested in one another, this alone is the best already.
    for index in sorted(range(len(groups)), key=lambda i: (len(groups[i].holders), groups[i].holders)):
        shares[index] = _poured(groups[index], loads)
    flow = _Flow(_Network.of(groups, shares, loads))
    limit_bytes = -(-sum(loads) // len(loads))
    while (stuck := flow.lower_to(limit_bytes)) is not None:
        # Nothing of what they write can be written by anyone else: on average they can't have less.
        limit_bytes = -(-sum(loads[rank] for rank in stuck) // len(stuck))
    return Shares(of_groups=tuple(shares), heaviest_bytes=max(loads))


def _poured(group: Group, loads: list[int]) -> dict[int, int]:
    """The group's bytes on its least loaded holders, as water finds its level; they are in `loads` then."""
    ranks = sorted(group.holders, key=lambda rank: (loads[rank], rank))
    total = group.size_bytes
    n_filled, below = 0, 0
    for rank in ranks:
        if n_filled and loads[rank] * n_filled - below >= total:
            break
        n_filled += 1
        below += loads[rank]
    surface, rest = divmod(total + below, n_filled)
    poured = {}
    for place, rank in enumerate(ranks[:n_filled]):
        poured[rank] = surface + (place < rest) - loads[rank]
        loads[rank] += poured[rank]
    return poured


@dataclass(frozen=True, slots=True, kw_only=True)
class _Network:
    """Ranks and groups, by number, and what is on its way between them."""

    shares: list[dict[int, int]]
    loads: list[int]
    holders: list[tuple[int, ...]]
    groups_of: list[list[int]]

    @classmethod
    def of(cls, groups: Sequence[Group], shares: list[dict[int, int]], loads: list[int]) -> "_Network":
        groups_of: list[list[int]] = [[] for _ in loads]
        for index, group in enumerate(groups):
            for rank in group.holders:
                groups_of[rank].append(index)
        holders = [group.holders for group in groups]
        return cls(shares=shares, loads=loads, holders=holders, groups_of=groups_of)


class _Flow:
    """Moves bytes from overloaded ranks along shortest ways through groups (Dinic's maximum flow)."""

    def __init__(self, network: _Network) -> None:
        self._net = network

    def lower_to(self, limit_bytes: int) -> set[int] | None:
        """No load is above the limit, or else: the ranks among which the excess stays whatever is done."""
        while True:
            sources = [rank for rank, load in enumerate(self._net.loads) if load > limit_bytes]
            if not sources:
                return None
            depths, group_depths = self._depths(sources)
            if all(self._net.loads[rank] >= limit_bytes for rank in depths):
                return set(depths)
            self._push_all(sources, limit_bytes, depths, group_depths)

    def _depths(self, sources: list[int]) -> tuple[dict[int, int], dict[int, int]]:
        """How many steps each reachable rank and group is away from the overloaded ranks."""
        depths = dict.fromkeys(sources, 0)
        group_depths: dict[int, int] = {}
        waiting = deque(sources)
        while waiting:
            rank = waiting.popleft()
            for index in self._net.groups_of[rank]:
                if index in group_depths or not self._net.shares[index].get(rank):
                    continue
                group_depths[index] = depths[rank] + 1
                for other in self._net.holders[index]:
                    if other not in depths:
                        depths[other] = depths[rank] + 2
                        waiting.append(other)
        return depths, group_depths

    def _push_all(
        self, sources: list[int], limit_bytes: int, depths: dict[int, int], group_depths: dict[int, int]
    ) -> None:
        """What can go along ways of growing depth went; each dead end is tried once."""
        search = _Search(self._net, depths, group_depths)
        for source in sources:
            while self._net.loads[source] > limit_bytes and (way := search.way(source, limit_bytes)):
                self._move(source, way, limit_bytes)

    def _move(self, source: int, way: list[tuple[int, int]], limit_bytes: int) -> None:
        """As much as the way takes: each of its steps is a group and the rank that writes in place of the last."""
        amount = min(self._net.loads[source] - limit_bytes, limit_bytes - self._net.loads[way[-1][1]])
        giver = source
        for index, taker in way:
            amount = min(amount, self._net.shares[index][giver])
            giver = taker
        giver = source
        for index, taker in way:
            share = self._net.shares[index]
            share[giver] -= amount
            share[taker] = share.get(taker, 0) + amount
            giver = taker
        self._net.loads[source] -= amount
        self._net.loads[giver] += amount


class _Search:
    """Finds ways from overloaded ranks to ranks with room, along growing depths."""

    def __init__(self, network: _Network, depths: dict[int, int], group_depths: dict[int, int]) -> None:
        self._net = network
        self._depths = depths
        self._group_depths = group_depths
        self._tried_groups = dict.fromkeys(depths, 0)
        self._tried_holders = dict.fromkeys(group_depths, 0)

    def way(self, source: int, limit_bytes: int) -> list[tuple[int, int]] | None:
        """Groups and ranks up to one below the limit; None if there is no further way."""
        way: list[tuple[int, int]] = []
        while True:
            rank = way[-1][1] if way else source
            if self._net.loads[rank] < limit_bytes:
                return way
            step = self._step(rank)
            if step is not None:
                way.append(step)
            elif way:
                index, _ = way.pop()
                self._tried_holders[index] += 1
            else:
                return None

    def _step(self, rank: int) -> tuple[int, int] | None:
        groups = self._net.groups_of[rank]
        for place in range(self._tried_groups[rank], len(groups)):
            self._tried_groups[rank] = place
            index = groups[place]
            if self._group_depths.get(index) == self._depths[rank] + 1 and self._net.shares[index].get(rank):
                holder = self._holder(index)
                if holder is not None:
                    return index, holder
        self._tried_groups[rank] = len(groups)
        return None

    def _holder(self, index: int) -> int | None:
        holders = self._net.holders[index]
        for place in range(self._tried_holders[index], len(holders)):
            if self._depths.get(holders[place]) == self._group_depths[index] + 1:
                self._tried_holders[index] = place
                return holders[place]
        self._tried_holders[index] = len(holders)
        return None
