"""Bring one object of any kind to its wanted state: read, observe, decide, apply."""

import logging
import time
from abc import ABC, abstractmethod
from typing import Final, Generic, TypeVar

from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cluster.resources import Resource
from stepkeeper_operator.errors import AlreadyExistsError, ApiError, ConflictError, LeaseLostError
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.kinds.shared import Shared
from stepkeeper_operator.kinds.writing import ObjectWriter

__all__ = ["RETRY_SOON_S", "KindController"]

_log = logging.getLogger(__name__)

RETRY_SOON_S: Final = 0.5
"""Seconds until the retry after a conflict, unless the watch delivers the missing change earlier."""

SubjectT = TypeVar("SubjectT")
ObservedT = TypeVar("ObservedT")
DecisionT = TypeVar("DecisionT")


class KindController(ABC, Generic[SubjectT, ObservedT, DecisionT]):
    """Reconcile the objects of one kind, which implements the steps. No two workers have the same key at once."""

    def __init__(self, resource: Resource, shared: Shared) -> None:
        self._shared = shared
        self._writer = ObjectWriter(resource=resource, shared=shared)
        self._uids: dict[ObjectKey, str] = {}

    async def reconcile(self, key: ObjectKey) -> float | None:
        """Bring the object to its wanted state. Drop the memory of one that no longer exists.

        Returns:
            Seconds until the object is due again, or None to wait for an event.

        Raises:
            Exception: The object has to be retried with back-off. The error is already logged and counted.
        """
        raw = self._shared.cache.get_object(key)
        if raw is None:
            self._forget(key)
            return None
        started = time.monotonic()
        try:
            again_s = await self._take_steps(key, raw)
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
        self._shared.metrics.reconcile_seconds.labels(kind=key.kind).observe(time.monotonic() - started)
        return again_s

    def _count(self, key: ObjectKey, result: str) -> None:
        self._shared.metrics.reconciles.labels(kind=key.kind, result=result).inc()

    async def _take_steps(self, key: ObjectKey, raw: RawObject) -> float | None:
        uid = raw["metadata"]["uid"]
        if self._uids.setdefault(key, uid) != uid:  # another object has taken the name
            self._forget(key)
            self._uids[key] = uid
        subject, problems = self._read(key, raw)
        if subject is None:
            if self._shared.acting():
                await self._manage_unreadable(key, raw, problems)
            return None
        observed = await self._observe(key, subject, problems)
        decision = self._decide(subject, observed, now=self._shared.clock())
        # Requests take time: between two of them another operator may have taken over.
        if not self._shared.acting():
            return RETRY_SOON_S
        return await self._apply(key, subject, observed, decision)

    def _forget(self, key: ObjectKey) -> None:
        uid = self._uids.pop(key, None)
        if uid is not None:
            self._forget_object(key, uid)

    @abstractmethod
    def _read(self, key: ObjectKey, raw: RawObject) -> tuple[SubjectT | None, tuple[str, ...]]:
        """Read the object. Return None if nothing can be decided for it, and the parts that can't be read."""

    @abstractmethod
    async def _manage_unreadable(self, key: ObjectKey, raw: RawObject, problems: tuple[str, ...]) -> None:
        """Report the unreadable parts, and do what the raw object allows. Raises ApiError."""

    @abstractmethod
    async def _observe(self, key: ObjectKey, subject: SubjectT, problems: tuple[str, ...]) -> ObservedT:
        """Gather the input of the decision. `problems`: the parts that the subject lacks. No other step reads."""

    @abstractmethod
    def _decide(self, subject: SubjectT, observed: ObservedT, *, now: float) -> DecisionT:
        """Decide what to write, without reading or writing."""

    @abstractmethod
    async def _apply(
        self, key: ObjectKey, subject: SubjectT, observed: ObservedT, decision: DecisionT
    ) -> float | None:
        """Carry out the decision. No other step writes. Return when to reconcile again; see `reconcile`."""

    @abstractmethod
    def _forget_object(self, key: ObjectKey, uid: str) -> None:
        """Drop the memory of an object that no longer exists."""
