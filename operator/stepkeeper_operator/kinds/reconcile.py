"""Reconcile one object by its kind's controller, and count, log and retry the same way for all kinds."""

import logging
import time
from collections.abc import Mapping
from typing import Final, Protocol

from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cluster.resources import Resource
from stepkeeper_operator.errors import AlreadyExistsError, ApiError, ConflictError, LeaseLostError
from stepkeeper_operator.metrics import Metrics

__all__ = ["RETRY_SOON_S", "Controller", "Reconciler"]

_log = logging.getLogger(__name__)

RETRY_SOON_S: Final = 0.5
"""Seconds until the retry after a conflict, unless the watch delivers the missing change earlier."""


class Controller(Protocol):
    """The part of a reconcile that depends on the kind. No two workers have the same key at once."""

    @property
    def resource(self) -> Resource:
        """The kind."""

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Bring a cached object to its wanted state: parse it once, observe, decide, apply.

        Returns:
            Seconds until the object is due again, or None to wait for an event.

        Raises:
            ConflictError, AlreadyExistsError: The cache was out of date. The object is retried soon.
            Exception: Any other failure. The object is retried with back-off.
        """

    def forget(self, key: ObjectKey) -> None:
        """Drop the memory of an object that no longer exists."""


class Reconciler:
    """Reconcile the objects that the queue hands out. `controllers` are by kind."""

    def __init__(self, *, controllers: Mapping[str, Controller], cache: Cache, metrics: Metrics) -> None:
        self._controllers = controllers
        self._cache = cache
        self._metrics = metrics

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Bring the object to its wanted state. Return the seconds until it is due again, or None.

        Raises:
            Exception: The object has to be retried with back-off. The error is already logged and counted.
        """
        controller = self._controllers.get(key.kind)
        if controller is None:
            _log.debug("no controller of this kind", extra=key.log_fields)
            return None
        if not self._cache.knows(key):
            controller.forget(key)
            return None
        return await self._reconcile(controller, key)

    async def _reconcile(self, controller: Controller, key: ObjectKey) -> float | None:
        started = time.monotonic()
        try:
            again_s = await controller.reconcile(key)
        except (ConflictError, AlreadyExistsError) as error:
            _log.debug("cache is out of date", extra={**key.log_fields, "error": str(error)})
            self._count(key, "behind")
            return RETRY_SOON_S
        except Exception as error:
            expected = isinstance(error, (ApiError, LeaseLostError, OSError, TimeoutError))
            extra = {**key.log_fields, "error": str(error)}
            _log.warning("cannot reconcile", extra=extra, exc_info=not expected)
            self._count(key, "error")
            raise
        self._count(key, "done")
        self._metrics.reconcile_seconds.labels(kind=key.kind).observe(time.monotonic() - started)
        return again_s

    def _count(self, key: ObjectKey, result: str) -> None:
        self._metrics.reconciles.labels(kind=key.kind, result=result).inc()
