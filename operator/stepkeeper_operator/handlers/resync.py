"""Compare the cache with lists: wait until it has all objects, and forget those whose deletion no watch reported."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import ObjectKey
from stepkeeper_operator.cache.kinds import WatchedKind
from stepkeeper_operator.cluster.protocol import Cluster
from stepkeeper_operator.errors import ApiError

__all__ = ["Resync", "forget_deleted_objects", "wait_until_listed"]

_log = logging.getLogger(__name__)

_RELIST_BURST_S: Final = 2.0
"""Seconds in which the objects of a relist arrive: one by one, and one kind after the other."""

_LISTING_S: Final = 1.0
"""Seconds between two looks whether the watches have listed all objects."""


async def wait_until_listed(
    cluster: Cluster, cache: Cache, kinds: Iterable[WatchedKind], namespaces: Sequence[str] = ()
) -> None:
    """Wait until the watches have brought every object of these kinds that exists at some time of the wait.

    `namespaces`: those that are watched; empty: all.
    """
    for kind in kinds:
        missing = await _find_missing(cluster, cache, kind, namespaces)
        while missing:
            await asyncio.sleep(_LISTING_S)
            before, missing = missing, missing - cache.list_uids(kind.resource)
            if missing == before:  # they may have been deleted before the watch listed its kind
                missing = await _find_missing(cluster, cache, kind, namespaces)
            if missing == before:
                extra = {"kind": kind.resource.kind, "missing": len(missing)}
                _log.info("no object is reconciled before the watch has listed all", extra=extra)


async def _find_missing(
    cluster: Cluster, cache: Cache, kind: WatchedKind, namespaces: Sequence[str]
) -> frozenset[str]:
    """Find the objects of the kind that the cache lacks, also after errors."""
    while True:
        try:
            # One that has become readable since the watches started is watched from the next start.
            places = (None,) if kind.resource.cluster_wide or not namespaces else namespaces
            present = [await _list_present(cluster, kind, namespace=place) for place in places]
            return frozenset[str]().union(*present) - cache.list_uids(kind.resource)
        except ApiError as error:
            extra = {"kind": kind.resource.kind, "error": str(error)}
            _log.warning("cannot list kind; no object is reconciled", extra=extra)
            await asyncio.sleep(_RELIST_BURST_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resync:
    """Queue all objects once per period, and sweep after each relist.

    A watch relists its kind after an interruption. A sweep lists kinds too, and forgets objects that are gone.
    """

    cluster: Cluster
    cache: Cache
    kinds: tuple[WatchedKind, ...]
    enqueue: Callable[[ObjectKey, float], None]
    relisted: asyncio.Event
    period_s: float

    async def run(self, reconciled: Collection[str], *, until: Callable[[], Awaitable[bool]]) -> None:
        """Queue the objects of the `reconciled` kinds once per period, until `until`, called as often, returns True."""
        while True:
            try:
                async with asyncio.timeout(self.period_s):
                    await self._sweep_after_relists()
            except TimeoutError:
                _log.debug("resync")
                if await until():
                    return
            await self.sweep()
            for key in (key for kind in reconciled for key in self.cache.list_keys(kind)):
                self.enqueue(key, random.uniform(0, self.period_s / 2))  # noqa: S311  # no secret

    async def _sweep_after_relists(self) -> None:
        """Sweep after each relist, and retry kinds that could not be listed, with back-off."""
        while True:
            await self.relisted.wait()
            await asyncio.sleep(_RELIST_BURST_S)
            self.relisted.clear()
            failed, pause_s = await self.sweep(), _RELIST_BURST_S
            while failed:
                pause_s *= 2
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.relisted.wait(), pause_s)
                    break  # the next sweep covers all kinds
                failed = await self.sweep(failed)

    async def sweep(self, kinds: Iterable[WatchedKind] | None = None) -> tuple[WatchedKind, ...]:
        """Forget the deleted objects of these kinds; None: of all. Return the kinds that can't be listed now."""
        failed: list[WatchedKind] = []
        for kind in self.kinds if kinds is None else kinds:
            try:
                concerned = await forget_deleted_objects(self.cluster, self.cache, kind)
            except ApiError as error:
                extra = {"kind": kind.resource.kind, "error": str(error)}
                _log.warning("cannot look for deleted objects", extra=extra)
                failed.append(kind)
                continue
            for key in concerned:
                self.enqueue(key, 0.0)
        return tuple(failed)


async def forget_deleted_objects(cluster: Cluster, cache: Cache, kind: WatchedKind) -> tuple[ObjectKey, ...]:
    """Forget every object of the kind that was deleted before this call. Return the keys that this concerns.

    Raises ApiError if the kind can't be listed.
    """
    # Take the known uids first: an object created during the list is then in neither set.
    known = cache.list_uids(kind.resource)
    return cache.forget_objects(known - await _list_present(cluster, kind))


async def _list_present(
    cluster: Cluster, kind: WatchedKind, *, namespace: str | None = None
) -> frozenset[str]:
    try:
        return await cluster.list_uids(kind.resource, kind.label_selector, namespace=namespace)
    except ApiError as error:
        is_gone = error.status == HTTPStatus.NOT_FOUND and kind.removable
        if not (is_gone or (namespace is not None and error.status == HTTPStatus.FORBIDDEN)):
            raise
        return frozenset()  # the kind's CRD or the namespace was removed, and its objects with it
