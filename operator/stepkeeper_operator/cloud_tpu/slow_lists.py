"""List a place for a reconcile that can't wait long: its worker is needed elsewhere."""

import asyncio
import logging
from collections.abc import Callable

from stepkeeper_operator.cloud_tpu.cloud import CloudTPU, CloudTPUError, ErrorKind, Place
from stepkeeper_operator.cloud_tpu.polling import Listing, Poller

__all__ = ["ImpatientPoller"]

_log = logging.getLogger(__name__)


class ImpatientPoller:
    """Ask the shared `Poller`, and give up waiting after `wait_s`. The list itself goes on."""

    def __init__(self, cloud: CloudTPU, *, wait_s: float, clock: Callable[[], float]) -> None:
        self._poller = Poller(cloud, clock=clock)
        self._wait_s = wait_s
        self._slow: dict[Place, asyncio.Task[Listing]] = {}

    async def list_place(self, place: Place, *, newer_than: float) -> Listing:
        """Return a listing that was asked for after `newer_than`.

        Raises:
            CloudTPUError: The place can't be listed, or the list isn't there yet.
        """
        if place not in self._slow:
            task = asyncio.create_task(self._poller.list_place(place, newer_than=newer_than))
            await asyncio.wait({task}, timeout=self._wait_s)
            if task.done():
                return task.result()
            self._slow[place] = task
            task.add_done_callback(lambda done: self._end(place, done))
        raise CloudTPUError(ErrorKind.TRANSIENT, "DEADLINE_EXCEEDED", f"the list of {place.parent} is slow")

    def forget_place(self, place: Place) -> None:
        """Forget a place that no object is in any more."""
        self._poller.forget_place(place)

    def _end(self, place: Place, task: asyncio.Task[Listing]) -> None:
        self._slow.pop(place, None)
        if not task.cancelled() and task.exception() is not None:
            _log.info("slow list failed", extra={"place": place.parent, "error": str(task.exception())})
