"""Wait, on any rank, until rank 0's companion has finished the upkeep after the newest commit: checks and deletions."""

import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Final

from stepkeeper.coordination.rank_group import RankGroup
from stepkeeper.coordination.waits import Waits
from stepkeeper.errors import PeerLostError
from stepkeeper.loggers import logger

__all__ = ["UpkeepWait"]

_log: Final = logger(__name__)
_NAME: Final = "upkeep"
"""A name: the newest commit whose upkeep is done, published by rank 0."""

_LONGEST_S: Final = 900.0
"""Longer than any store's retries, and than the deletion of a large checkpoint."""

_LOOK_S: Final = 0.2
"""The interval at which rank 0 checks whether its wait has to end."""

_SHORTEST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.1


class UpkeepWait:
    """Track the newest commit, and whether its upkeep is done.

    The next start can do the upkeep too, so waits for it end after a notice or the loss of a rank.
    """

    def __init__(self, rank_group: RankGroup, waits: Waits) -> None:
        self._rank_group = rank_group
        self._waits = waits
        self._newest: int | None = None
        self._done: Future[None] | None = None
        self._publishing = threading.Lock()
        self._published = -1

    def note_commit(self, slot: int, done: Future[None] | None) -> None:
        """Record the newest commit, in the saves' thread, and on rank 0 the future for its upkeep's end."""
        self._newest, self._done = slot, done
        if done is not None and self._rank_group.world_size > 1:
            done.add_done_callback(lambda _: self._start_to_publish(slot))

    def await_newest(self) -> None:
        """Wait, on any rank, until the upkeep after the newest commit has ended. Failures are logged only."""
        slot = self._newest
        if slot is None:
            return
        ends_s, pause_s = time.monotonic() + _LONGEST_S, _SHORTEST_PAUSE_S
        while not self._has_ended(slot, pause_s):
            if self._waits.has_to_hurry:
                _log.info("the next start does the upkeep after the commit in slot %d", slot)
                return
            if time.monotonic() >= ends_s:
                _log.warning(
                    "old commits may still exist: the upkeep after the commit in slot %d isn't done after %.0f s, and "
                    "is no longer waited for",
                    slot,
                    _LONGEST_S,
                )
                return
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _has_ended(self, slot: int, pause_s: float) -> bool:
        """Return True if the upkeep has ended, or its end can't be seen; else return False after a pause."""
        if self._rank_group.rank == 0:
            return self._done is None or self._has_ended_here(self._done)
        try:
            found = self._rank_group.read_proposal(_NAME)
        except PeerLostError as error:
            _log.warning("old commits may still exist, the ranks' store is gone: %s", error)
            return True
        if found is not None and found["commit"] >= slot:
            return True
        time.sleep(pause_s)
        return False

    def _has_ended_here(self, done: Future[None]) -> bool:
        if wait_for([done], _LOOK_S).not_done:
            return False
        if (error := done.exception()) is not None:
            _log.warning("old commits may still exist until the next save: %s", error)
        return True

    def _start_to_publish(self, slot: int) -> None:
        # The calling thread receives the companion's messages, and must not wait for the ranks' store.
        threading.Thread(target=self._publish, args=(slot,), name="upkeep", daemon=True).start()

    def _publish(self, slot: int) -> None:
        # Without the store no rank reads the value.
        with self._publishing, suppress(PeerLostError):
            if slot > self._published:
                self._rank_group.publish(_NAME, {"commit": slot})
                self._published = slot
