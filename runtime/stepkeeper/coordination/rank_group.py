"""Let the processes that train together talk to each other: the interface, and the group of one process."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

import torch.distributed as dist

from stepkeeper.coordination.store_rank_group import StoreRankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import PeerLostError
from stepkeeper.time_limits import TimeLimits
from stepkeeper_planners.geometry.layout import Ranks

__all__ = ["RankGroup", "SoloRankGroup", "StoreRankGroup", "open_rank_group", "world_size_of"]


class RankGroup(Protocol):
    """The processes that train together. All ranks call the same methods with the same names, each name once."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def ranks(self) -> Ranks:
        """This rank, the world size, and which processes the ranks are."""
        ...

    @property
    def store_host(self) -> str | None:
        """The host of the ranks' store, which all of them reach; None if the store is no server."""
        ...

    @property
    def limits(self) -> TimeLimits:
        """The limits of this rank's waits for others."""
        ...

    def broadcast(self, name: str, value: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """Return rank 0's `value` in every rank. Raises PeerLostError if it doesn't come in time."""
        ...

    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Return the values of all ranks, by rank, in rank 0. The other ranks get nothing, and don't wait.

        Raises PeerLostError, which names the first rank that is missing when the time is up.
        """
        ...

    def abort(self) -> None:
        """Make everyone in this process who waits for another rank get a PeerLostError soon: the process ends."""
        ...

    def watch_peers(self) -> None:
        """Notice from now on when another rank ends, whatever this one does. Ranks: all ranks call this."""
        ...

    def look_for_loss(self) -> None:
        """End all waits of this process if a rank was announced as lost. Raises PeerLostError without the store."""
        ...

    def read_moved(self) -> int:
        """Return how many bytes saves and restores of all ranks have moved. Raises PeerLostError without the store."""
        ...

    def heartbeat(self) -> AbstractContextManager[Callable[[int], None]]:
        """Beat while the block runs. A rank that waits for this one takes it for lost if no beat comes.

        The block gets a function that notes how many more bytes were moved, which the next beat reports.
        """
        ...

    def announce_leave(self, error: BaseException | None, timeout_s: float) -> None:
        """Tell the other ranks that this one leaves, and whether that is for an `error`; None: in order.

        The store has `timeout_s` seconds for its answer.
        No rank waits for it any more. Where it leaves for an error, all waits of the others end.
        """
        ...

    def leave(self, timeout_s: float) -> None:
        """Wait until the others have read what this rank broadcast, for `timeout_s` at most.

        The store is in rank 0. A rank that came late would find it gone, and take rank 0 for lost.
        """
        ...

    def propose(self, name: str, value: Mapping[str, Any]) -> None:
        """Give `name` this value, unless another rank has proposed one before."""
        ...

    def publish(self, name: str, value: Mapping[str, Any]) -> None:
        """Give `name` this value, in place of the one that it had. One rank publishes under a name."""
        ...

    def read_proposal(self, name: str) -> dict[str, Any] | None:
        """Return at once what was proposed for `name`, or published; None if nothing was yet."""
        ...


class SoloRankGroup:
    """The rank group of one process."""

    rank: Final = 0
    world_size: Final = 1
    ranks: Final = Ranks(rank=0, world_size=1)
    store_host: Final = None

    def __init__(self) -> None:
        self.limits: Final = TimeLimits()
        self._proposals: dict[str, dict[str, Any]] = {}

    def broadcast(self, name: str, value: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:  # noqa: ARG002  # the protocol's signature
        if value is None:
            raise PeerLostError(f"{name}: rank 0 has no value to give")
        return dict(value)

    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:  # noqa: ARG002  # the protocol's signature
        return [dict(value)]

    def abort(self) -> None:
        """Do nothing: nobody waits."""

    def watch_peers(self) -> None:
        """Do nothing: there is no peer."""

    def look_for_loss(self) -> None:
        """Do nothing: there is no peer."""

    def read_moved(self) -> int:
        return 0

    def heartbeat(self) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda _n_bytes: None)

    def announce_leave(self, error: BaseException | None, timeout_s: float) -> None:
        """Do nothing: nobody listens."""

    def leave(self, timeout_s: float) -> None:
        """Do nothing: nobody reads."""

    def propose(self, name: str, value: Mapping[str, Any]) -> None:
        self._proposals.setdefault(name, dict(value))

    def publish(self, name: str, value: Mapping[str, Any]) -> None:
        self._proposals[name] = dict(value)

    def read_proposal(self, name: str) -> dict[str, Any] | None:
        return self._proposals.get(name)


def world_size_of(group: dist.ProcessGroup | None) -> int:
    """Count the processes that train together: those of the process group, or this one alone if there is none."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def open_rank_group(group: dist.ProcessGroup | None, waits: Waits) -> RankGroup:
    """Open the rank group that this process trains in. `waits` ends the waits for other ranks."""
    return StoreRankGroup.of(group, waits) if world_size_of(group) > 1 else SoloRankGroup()
