"""Let the processes that train together talk to each other: the interface, and the group of one process."""

from collections.abc import Mapping
from typing import Any, Final, Protocol

import torch.distributed as dist

from stepkeeper.coordination.store_rank_group import StoreRankGroup
from stepkeeper.errors import PeerLostError
from stepkeeper_planners.geometry.layout import Ranks

__all__ = ["RankGroup", "SoloRankGroup", "StoreRankGroup", "open_rank_group", "world_size_of"]


class RankGroup(Protocol):
    """All ranks call the same methods with the same names, each name once."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def ranks(self) -> Ranks:
        """Rank and world size, and which processes these are."""
        ...

    def broadcast(self, name: str, value: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """Rank 0's `value`. Raises PeerLostError if it doesn't come in time."""
        ...

    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """In rank 0 the values of all ranks, by rank; nothing in the others, which don't wait.

        Raises PeerLostError naming the first rank that is missing when the time is up.
        """
        ...

    def abort(self) -> None:
        """Whoever waits for another rank gets a PeerLostError soon: this process ends."""
        ...

    def leave(self, timeout_s: float) -> None:
        """What this rank broadcast was read by the others, or they had `timeout_s` to do so.

        The store is in rank 0: a rank that comes late would find that gone, and take rank 0 for lost.
        """
        ...

    def propose(self, name: str, value: Mapping[str, Any]) -> None:
        """`name` has a value: this one, or one that another rank proposed before."""
        ...

    def read_proposal(self, name: str) -> dict[str, Any] | None:
        """What was proposed for `name`, at once; None if nothing was yet."""
        ...


class SoloRankGroup:
    """One process is all there is."""

    rank: Final = 0
    world_size: Final = 1
    ranks: Final = Ranks(rank=0, world_size=1)

    def __init__(self) -> None:
        self._proposals: dict[str, dict[str, Any]] = {}

    def broadcast(self, name: str, value: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:  # noqa: ARG002  # the protocol's signature
        if value is None:
            raise PeerLostError(f"{name}: rank 0 has no value to give")
        return dict(value)

    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:  # noqa: ARG002  # the protocol's signature
        return [dict(value)]

    def abort(self) -> None:
        """Nobody waits."""

    def leave(self, timeout_s: float) -> None:
        """Nobody reads."""

    def propose(self, name: str, value: Mapping[str, Any]) -> None:
        self._proposals.setdefault(name, dict(value))

    def read_proposal(self, name: str) -> dict[str, Any] | None:
        return self._proposals.get(name)


def world_size_of(group: dist.ProcessGroup | None) -> int:
    """How many processes train together: the process group's, or this one alone where there is none."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def open_rank_group(group: dist.ProcessGroup | None) -> RankGroup:
    """The rank group that this process trains in."""
    return StoreRankGroup.of(group) if world_size_of(group) > 1 else SoloRankGroup()
