"""List the resources of a place once for all objects that are there, and keep the answer for a while."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudNode,
    CloudQueuedResource,
    CloudTPU,
    CloudTPUError,
    Place,
)

__all__ = ["Listing", "Poller"]

_log = logging.getLogger(__name__)

_ERROR_KEPT_S: Final = 5.0
"""Seconds for which a failed list answers for all who ask: 200 resources of a place send one request, not 200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Everything of one place, as the API had it after `asked_at`."""

    asked_at: float
    """Unix time just before the requests were sent: what was written before it is in the listing."""

    resources: dict[str, CloudQueuedResource] = field(default_factory=dict)
    """Queued resources by id."""

    nodes: dict[str, CloudNode] = field(default_factory=dict)
    """Nodes by id."""


@dataclass(slots=True)
class _Lists:
    """The lists of a place by one version of the API."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    listing: Listing | None = None
    failed: tuple[float, CloudTPUError] | None = None


class Poller:
    """Share the lists of each place among all resources there."""

    def __init__(self, cloud: CloudTPU, *, clock: Callable[[], float] = time.time) -> None:
        self._cloud = cloud
        self._clock = clock
        self._lists: dict[tuple[Place, ApiVersion], _Lists] = {}

    async def list_place(self, place: Place, version: ApiVersion, *, newer_than: float) -> Listing:
        """Return a listing that was asked for after `newer_than`, a Unix time. Whoever comes meanwhile shares it.

        Once a resource of the place needs v2alpha1, the place is listed with it: it shows all that v2 shows. Where
        v2alpha1 doesn't answer, the others are told what v2 shows.

        Raises:
            CloudTPUError: The place can't be listed. The error answers for some seconds.
        """
        alpha = self._lists.get((place, ApiVersion.V2ALPHA1))
        if version is ApiVersion.V2 and alpha is not None and alpha.failed is None:
            try:
                return await self._share(alpha, place, ApiVersion.V2ALPHA1, newer_than)
            except CloudTPUError as error:  # whoever needs v2alpha1 is told of it when they ask
                _log.info("v2alpha1 fails; asking v2", extra={"place": place.parent, "error": str(error)})
        lists = self._lists.setdefault((place, version), _Lists())
        return await self._share(lists, place, version, newer_than)

    def forget_place(self, place: Place) -> None:
        """Forget the listings of a place that no object is in any more."""
        for version in ApiVersion:
            self._lists.pop((place, version), None)

    async def _share(self, lists: _Lists, place: Place, version: ApiVersion, newer_than: float) -> Listing:
        async with lists.lock:
            if lists.listing is not None and lists.listing.asked_at > newer_than:
                return lists.listing
            now = self._clock()
            if lists.failed is not None and 0 <= now - lists.failed[0] < _ERROR_KEPT_S:
                raise lists.failed[1]
            try:
                lists.listing = await self._list(place, version, now)
            except CloudTPUError as error:
                lists.failed = (now, error)
                raise
            lists.failed = None
            return lists.listing

    async def _list(self, place: Place, version: ApiVersion, now: float) -> Listing:
        # Nodes first: a node that is listed belongs to a resource that the second list still shows, or that is gone.
        nodes = await self._cloud.list_nodes(place, version)
        resources = await self._cloud.list_queued_resources(place, version)
        return Listing(
            asked_at=now,
            resources={resource.id: resource for resource in resources},
            nodes={node.id: node for node in nodes},
        )
