"""Bring one object of any kind to its wanted state: read, observe, decide, apply."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from typing_extensions import override

from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cluster.resources import Resource
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.kinds.reconcile import RETRY_SOON_S, Controller

__all__ = ["KindController"]

SubjectT = TypeVar("SubjectT")
ObservedT = TypeVar("ObservedT")
DecisionT = TypeVar("DecisionT")


class KindController(ABC, Controller, Generic[SubjectT, ObservedT, DecisionT]):
    """Reconcile the objects of one kind. Each kind implements the steps."""

    def __init__(
        self,
        resource: Resource,
        *,
        cache: Cache,
        acting: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._resource = resource
        self._cache = cache
        self._acting = acting
        self._clock = clock
        self._uids: dict[ObjectKey, str] = {}

    @property
    @override
    def resource(self) -> Resource:
        return self._resource

    @override
    async def reconcile(self, key: ObjectKey) -> float | None:
        raw = self._cache.get_object(key)
        if raw is None:
            self.forget(key)
            return None
        uid = raw["metadata"]["uid"]
        if self._uids.setdefault(key, uid) != uid:  # another object has taken the name
            self.forget(key)
            self._uids[key] = uid
        subject, problems = self._read(key, raw)
        if subject is None:
            if self._acting():
                await self._manage_unreadable(key, raw, problems)
            return None
        observed = await self._observe(key, subject)
        decision = self._decide(subject, observed, now=self._clock())
        # Requests take time: between two of them another operator may have taken over.
        if not self._acting():
            return RETRY_SOON_S
        return await self._apply(key, subject, observed, decision)

    @override
    def forget(self, key: ObjectKey) -> None:
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
    async def _observe(self, key: ObjectKey, subject: SubjectT) -> ObservedT:
        """Gather the input of the decision. No other step of a reconcile reads from the cluster."""

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
