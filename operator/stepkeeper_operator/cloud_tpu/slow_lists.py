"""List a place for a reconcile that can't wait long: its worker is needed elsewhere."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from stepkeeper_operator.cloud_tpu.cloud import CloudTPU, CloudTPUError, ErrorKind, Place
from stepkeeper_operator.cloud_tpu.polling import Listing, Poller

__all__ = ["ImpatientPoller", "SlowListError"]

_log = logging.getLogger(__name__)

_KEPT_S: Final = 60.0
"""Seconds after its end for which a slow list is kept for those who waited for it."""


class SlowListError(CloudTPUError):
    """The list goes on. Whoever asks again once it has ended gets what it brought."""

    def __init__(self, place: Place) -> None:
        super().__init__(ErrorKind.TRANSIENT, "DEADLINE_EXCEEDED", f"the list of {place.parent} is slow")


@dataclass(slots=True)
class _SlowList:
    """A list that somebody has given up waiting for."""

    place: Place
    task: asyncio.Task[Listing]
    ended_at: float | None = None


class ImpatientPoller:
    """Ask the shared `Poller`, and give up waiting after `wait_s`. The list itself goes on."""

    def __init__(self, cloud: CloudTPU, *, wait_s: float, clock: Callable[[], float]) -> None:
        self._poller = Poller(cloud, clock=clock)
        self._wait_s = wait_s
        self._clock = clock
        self._slow: dict[Place, _SlowList] = {}
        self._owed: dict[str, _SlowList] = {}

    async def list_place(self, place: Place, *, newer_than: float, after: float, asker: str) -> Listing:
        """Return a listing that was asked for after `newer_than`, or the one that `asker` has waited for.

        However long a list takes, its asker gets it: otherwise it would be too old each time, and nothing would ever
        happen at a slow place.

        Args:
            place: The place.
            newer_than: Unix time after which a listing is new enough.
            after: Unix time of the asker's last request there: what was listed before says nothing.
            asker: Uid of the object that it is for.

        Raises:
            SlowListError: The list isn't there yet.
            CloudTPUError: The place can't be listed.
        """
        owed = self._owed.get(asker)
        if owed is not None and owed.ended_at is not None:
            del self._owed[asker]
            if self._is_usable(owed, place, after):
                return owed.task.result()
        slow = self._slow.get(place)
        if slow is None:
            task = asyncio.create_task(self._poller.list_place(place, newer_than=max(newer_than, after)))
            await asyncio.wait({task}, timeout=self._wait_s)
            if task.done():
                return task.result()
            own = _SlowList(place=place, task=task)
            task.add_done_callback(lambda _: self._end(own))
            slow = self._slow.setdefault(place, own)
            self._owed[asker] = own
        elif owed is None or owed.ended_at is not None:
            self._owed[asker] = slow
        raise SlowListError(place)

    def forget_asker(self, asker: str) -> None:
        """Forget what an object that is gone has waited for."""
        self._owed.pop(asker, None)

    def forget_place(self, place: Place) -> None:
        """Forget a place that no object is in any more."""
        self._poller.forget_place(place)

    def _is_usable(self, slow: _SlowList, place: Place, after: float) -> bool:
        """Return True if the list, or the error that it ended with, is an answer to who asks now."""
        kept = slow.ended_at is not None and self._clock() - slow.ended_at < _KEPT_S
        if not kept or slow.place != place or slow.task.cancelled():
            return False
        return slow.task.exception() is not None or slow.task.result().asked_at > after

    def _end(self, slow: _SlowList) -> None:
        slow.ended_at = self._clock()
        if self._slow.get(slow.place) is slow:
            del self._slow[slow.place]
        if not slow.task.cancelled() and slow.task.exception() is not None:
            extra = {"place": slow.place.parent, "error": str(slow.task.exception())}
            _log.info("slow list failed", extra=extra)
