"""Track which ranks are lost or have left, and announce when this one leaves.

A rank is lost if it ended without notice, left because of an error, or was given up by another. The first announcement
of a lost rank stays in the ranks' store, so that all ranks name the same one.
"""

import atexit
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol
from weakref import WeakSet

from stepkeeper.coordination.peer_links import PeerLinks
from stepkeeper.coordination.store_callers import STORE_CALLS
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import FencedError, PeerLostError, StepkeeperError
from stepkeeper.fork_guard import forget_in_forks
from stepkeeper.loggers import logger

__all__ = ["Board", "PeerWatch"]

_log: Final = logger(__name__)
_LOST: Final = "lost"
_LEFT: Final = "left"
_LINKS: Final = "links"
"""Names in the store: the first lost rank, and, with a rank's number, that it left, and its address."""

_WHY_LIMIT: Final = 500
_ANNOUNCE_S: Final = 1.0
"""The time for announcing that a rank leaves or is lost. The store may be gone with rank 0."""


class Board(Protocol):
    """The ranks' store, in which the first value that is proposed under a name stays.

    The methods raise PeerLostError if the store is gone or doesn't answer in `within_s` seconds; None: as long as waits
    may continue.
    """

    def propose(self, name: str, value: Mapping[str, Any], *, within_s: float | None = None) -> None: ...

    def read_proposal(self, name: str, *, within_s: float | None = None) -> dict[str, Any] | None: ...


class PeerWatch:
    """Watch the other ranks for one rank, announce each lost one in the store, and end the waits for it."""

    def __init__(self, board: Board, rank: int, world_size: int, waits: Waits) -> None:
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._waits = waits
        self._links: PeerLinks | None = None
        self._has_left = False
        forget_in_forks(self)

    def forget_after_fork(self) -> None:
        """Announce nothing from now on: a forked child isn't the rank."""
        self._has_left = True

    def start(self, towards: str | None, await_value: Callable[[str, int], dict[str, Any]]) -> None:
        """Connect with the neighbors in the tree of ranks. All ranks call this once all have met.

        A failure is logged; losses are still announced in the store. `towards` is a host that all ranks
        reach, if there is one, and `await_value` waits for a value that another rank puts into the store.
        """
        try:
            self._links = links = PeerLinks(self._rank, self._world_size, self._note_ended)
            _watches.add(self)
            self._board.propose(f"{_LINKS}/{self._rank}", links.describe(towards))
            if links.above is not None:
                links.connect_above(links.above, await_value(f"{_LINKS}/{links.above}", links.above))
        except OSError as error:
            # PeerLostError and NoticeDeadlineError are OSErrors too, and end the start.
            if isinstance(error, StepkeeperError):
                raise
            text = "rank %d isn't connected to its neighbors, and detects a lost rank late: %s"
            _log.warning(text, self._rank, error)

    def announce_loss(
        self, rank: int, why: str, *, fenced: bool = False, timeout_s: float = _ANNOUNCE_S
    ) -> StepkeeperError:
        """Announce that a rank is lost, and return the error with which all waits end.

        The error names the rank that was announced first. `fenced`: this rank left because another claim owns the root,
        so the others have lost the root too.
        """
        return _loss(self._announce({"rank": rank, "why": why, "fenced": fenced}, timeout_s))

    def _announce(self, announced: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """Announce a lost rank, and return the first announcement, of this rank or another one."""
        ends_s = time.monotonic() + timeout_s
        try:
            self._board.propose(_LOST, announced, within_s=timeout_s)
            return self._board.read_proposal(_LOST, within_s=ends_s - time.monotonic()) or announced
        except PeerLostError:
            # The store is gone or hangs with rank 0.
            return announced

    def announce_leave(self, error: BaseException | None, timeout_s: float = _ANNOUNCE_S) -> None:
        """Announce that this rank leaves, because of an `error` or in order. A second call does nothing."""
        if self._has_left:
            return
        self._has_left = True
        if error is None:
            with suppress(PeerLostError):
                self._board.propose(f"{_LEFT}/{self._rank}", {}, within_s=timeout_s)
        else:
            why = f"it left with {type(error).__name__}: {error}"[:_WHY_LIMIT]
            fenced = isinstance(error, FencedError)
            self.announce_loss(self._rank, why, fenced=fenced, timeout_s=timeout_s)
        if self._links is not None:
            self._links.close(bye=error is None)

    def look_for_loss(self) -> None:
        """End all waits of this process if a rank is lost. Raises PeerLostError without the store."""
        if self._waits.loss is not None:
            return
        if (lost := self._board.read_proposal(_LOST)) is not None:
            self._end_waits(lost)

    def check_wait(self, waited_for: int, since_s: float) -> None:
        """Check that the wait for a rank may continue. Raises the error for which it has to end."""
        self.look_for_loss()
        self._waits.check(since_s)
        if self._board.read_proposal(f"{_LEFT}/{waited_for}") is not None:
            raise PeerLostError(f"rank {waited_for} has left, and rank {self._rank} waits for it")

    def _note_ended(self, rank: int, why: str) -> None:
        """Handle the end of `rank` without a byte of notice. A reason that it announced in the store stays."""
        self._end_waits(self._announce({"rank": rank, "why": why, "died": True}, _ANNOUNCE_S))

    def _end_waits(self, announced: Mapping[str, Any]) -> None:
        self._waits.end_all(_loss(announced), is_death=bool(announced.get("died")))


def _loss(announced: Mapping[str, Any]) -> StepkeeperError:
    """Build the error that names a lost rank, from its announcement."""
    text = f"rank {announced['rank']} is lost: {announced['why']}"
    return FencedError(text) if announced.get("fenced") else PeerLostError(text)


_watches: Final[WeakSet[PeerWatch]] = WeakSet()


@atexit.register
def _announce_end() -> None:
    """Announce that this process ends though its manager wasn't closed, in order or by an exception."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for watch in list(_watches):
        watch.announce_leave(error)
    STORE_CALLS.end(_ANNOUNCE_S)
