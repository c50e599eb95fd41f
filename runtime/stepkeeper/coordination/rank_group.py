"""Exchange values among the processes that train together: the interface, and the group of one process."""

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
        """This rank, the world size, and the processes of the ranks."""

    @property
    def store_host(self) -> str | None:
        """The host of the ranks' store, which all of them reach; None if the store is no server."""

    @property
    def limits(self) -> TimeLimits:
        """The limits of this rank's waits for others."""

    def broadcast(self, name: str, value: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """Return rank 0's `value` in every rank. Raises PeerLostError if it doesn't come in time."""

    def gather(self, name: str, value: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Return the values of all ranks, by rank, in rank 0. The others get an empty list, and don't wait.

        Raises PeerLostError, which names the first missing rank, when the time is up.
        """

    def abort(self) -> None:
        """End all waits of this process for other ranks soon, with a PeerLostError: the process ends."""

    def watch_peers(self) -> None:
        """Detect the end of other ranks from now on, even while this one is busy. Ranks: all ranks call this."""

    def look_for_loss(self) -> None:
        """End all waits of this process if a rank was announced as lost. Raises PeerLostError without the store."""

    def read_moved(self) -> int:
        """Return how many bytes saves and restores of all ranks have moved. Raises PeerLostError without the store."""

    def heartbeat(self) -> AbstractContextManager[Callable[[int], None]]:
        """Send heartbeats while the block runs. Without them, a rank that waits for this one gives it up.

        The block gets a function that counts moved bytes, which the next heartbeat reports.
        """

    def announce_leave(self, error: BaseException | None, timeout_s: float) -> None:
        """Announce that this rank leaves, and end the waits for it. An `error` ends all waits."""

    def leave(self, timeout_s: float) -> None:
        """Wait until the others have read this rank's broadcasts, since the store ends with rank 0."""

    def propose(self, name: str, value: Mapping[str, Any]) -> None:
        """Set the value of `name`, unless another rank has proposed one."""

    def publish(self, name: str, value: Mapping[str, Any]) -> None:
        """Set or replace the value of `name`. Only one rank publishes under a name."""

    def read_proposal(self, name: str) -> dict[str, Any] | None:
        """Return at once the proposed or published value of `name`; None if there is none."""


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
        """Do nothing: there are no waits."""

    def watch_peers(self) -> None:
        """Do nothing: there is no peer."""

    def look_for_loss(self) -> None:
        """Do nothing: there is no peer."""

    def read_moved(self) -> int:
        return 0

    def heartbeat(self) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda _n_bytes: None)

    def announce_leave(self, error: BaseException | None, timeout_s: float) -> None:
        """Do nothing: there is no peer."""

    def leave(self, timeout_s: float) -> None:
        """Do nothing: there is no peer."""

    def propose(self, name: str, value: Mapping[str, Any]) -> None:
        self._proposals.setdefault(name, dict(value))

    def publish(self, name: str, value: Mapping[str, Any]) -> None:
        self._proposals[name] = dict(value)

    def read_proposal(self, name: str) -> dict[str, Any] | None:
        return self._proposals.get(name)


def world_size_of(group: dist.ProcessGroup | None) -> int:
    """Count the processes that train together: the process group's, or one if there is no group."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def open_rank_group(group: dist.ProcessGroup | None, waits: Waits) -> RankGroup:
    """Open the rank group of this process. `waits` ends the waits for other ranks."""
    return StoreRankGroup.of(group, waits) if world_size_of(group) > 1 else SoloRankGroup()
