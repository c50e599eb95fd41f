"""Know which ranks are lost or have left, and tell the others when this one leaves."""

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
_WHY_LIMIT: Final = 500
_LAST_WORD_S: Final = 1.0
"""The time for what a rank says when it leaves, or of a rank that it has lost. The store may have gone with rank 0."""


class Board(Protocol):
    """The ranks' store: the first value of a name stays. Both methods raise PeerLostError without the store.

    `within_s` is the time for its answer; None: as long as waits may go on.
    """

    def propose(self, name: str, value: Mapping[str, Any], *, within_s: float | None = None) -> None: ...

    def read_proposal(self, name: str, *, within_s: float | None = None) -> dict[str, Any] | None: ...


class PeerWatch:
    """Watch the other ranks for one rank. It announces each loss, of whatever rank, in the store."""

    def __init__(self, board: Board, rank: int, world_size: int, waits: Waits) -> None:
        """Know nothing yet.

        Args:
            board: The ranks' store.
            rank: This rank.
            world_size: How many ranks there are.
            waits: Told when a rank is lost.

        """
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._waits = waits
        self._links: PeerLinks | None = None
        self._has_left = False
        forget_in_forks(self)

    def forget_after_fork(self) -> None:
        """Say nothing for the rank any more, in a forked child: it isn't the rank."""
        self._has_left = True

    def start(self, towards: str | None, await_value: Callable[[str, int], dict[str, Any]]) -> None:
        """Connect with the neighbours in the tree of ranks. A failure is logged: announcements tell of losses still.

        Ranks: all ranks call this, when all have met.

        Args:
            towards: A host that all ranks reach, if there is one.
            await_value: Waits for a value in the store that another rank puts there.

        """
        try:
            self._links = links = PeerLinks(self._rank, self._world_size, self._note_ended)
            _watches.add(self)
            self._board.propose(f"{_LINKS}/{self._rank}", links.describe(towards))
            if links.above is not None:
                links.connect_above(links.above, await_value(f"{_LINKS}/{links.above}", links.above))
        except OSError as error:  # PeerLostError and NoticeDeadlineError are among these
            if isinstance(error, StepkeeperError):
                raise
            _log.warning(
                "rank %d isn't connected with others, and notices late if one ends without a word: %s",
                self._rank,
                error,
            )

    def announce_loss(
        self, rank: int, why: str, *, fenced: bool = False, timeout_s: float = _LAST_WORD_S
    ) -> StepkeeperError:
        """Announce that a rank is lost, and return the error that names it.

        Whoever waits for a rank gets this error. If another rank was announced before, the error names that
        one.

        Args:
            rank: The rank that is lost.
            why: What is known of it.
            fenced: True if it left because another claim owns the root: the others have lost the root, too.
            timeout_s: The time for the store's answers.

        """
        return _loss(self._announce({"rank": rank, "why": why, "fenced": fenced}, timeout_s))

    def _announce(self, said: Mapping[str, Any], timeout_s: float) -> Mapping[str, Any]:
        """Announce that a rank is lost, and return what was announced first: this, or the loss of another one."""
        ends_s = time.monotonic() + timeout_s
        try:
            self._board.propose(_LOST, said, within_s=timeout_s)
            return self._board.read_proposal(_LOST, within_s=ends_s - time.monotonic()) or said
        except PeerLostError:
            # The store went with rank 0, or stands still with it.
            return said

    def announce_leave(self, error: BaseException | None, timeout_s: float = _LAST_WORD_S) -> None:
        """Tell the other ranks that this one leaves, because of an `error` or in order. A second call does nothing.

        The store has `timeout_s` seconds for its answer.
        """
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
        """Check that the wait for a rank, since that time, may go on. Raises why it has to end."""
        self.look_for_loss()
        self._waits.check(since_s)
        if self._board.read_proposal(f"{_LEFT}/{waited_for}") is not None:
            raise PeerLostError(f"rank {waited_for} has left, and rank {self._rank} waits for it")

    def _note_ended(self, rank: int, why: str) -> None:
        """Take over that `rank` has ended without a word to this one, unless it told the reason in the store."""
        self._end_waits(self._announce({"rank": rank, "why": why, "died": True}, _LAST_WORD_S))

    def _end_waits(self, said: Mapping[str, Any]) -> None:
        self._waits.end_all(_loss(said), is_death=bool(said.get("died")))


def _loss(said: Mapping[str, Any]) -> StepkeeperError:
    """Make the error that tells of a lost rank, from what was announced of it."""
    text = f"rank {said['rank']} is lost: {said['why']}"
    return FencedError(text) if said.get("fenced") else PeerLostError(text)


_watches: Final[WeakSet[PeerWatch]] = WeakSet()


@atexit.register
def _announce_end() -> None:
    """Tell the other ranks that this process ends though its manager wasn't closed: in order, or by an exception."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for watch in list(_watches):
        watch.announce_leave(error)
    STORE_CALLS.end(_LAST_WORD_S)
