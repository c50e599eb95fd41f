"""Define a kind's half of a reconcile. The shared half is `reconcile`."""

from typing import Final, Protocol

from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cluster import Resource

__all__ = ["RETRY_SOON_S", "Controller"]

RETRY_SOON_S: Final = 0.5
"""Seconds to look again after a conflict, if the watch doesn't bring the missing change before."""


class Controller(Protocol):
    """Reconcile the objects of one kind. The queue never hands the same key to two workers at once."""

    @property
    def resource(self) -> Resource:
        """The kind."""

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Bring an object that the cache has to its wanted state: parse it once, observe, decide, apply.

        Returns:
            Seconds until the object is to be looked at again, or None to wait for an event.

        Raises:
            ConflictError, AlreadyExistsError: The cache was behind. The object is looked at again soon.
            Exception: Anything else that went wrong. The object is tried again with back-off.
        """

    def forget(self, key: ObjectKey) -> None:
        """Drop all that is remembered of an object that is gone."""
