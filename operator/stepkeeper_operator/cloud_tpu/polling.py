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
    ErrorKind,
    Place,
)

__all__ = ["Listing", "Poller"]

_log = logging.getLogger(__name__)

_ERROR_KEPT_S: Final = 5.0
"""Seconds for which a failed list answers for all who ask: 200 resources of a place send one request, not 200."""

_REFUSAL_KEPT_S: Final = 300.0
"""Seconds after which v2alpha1 is asked again where it was refused: until somebody gives a permission, it stays so."""

_REFUSALS: Final = {ErrorKind.TERMINAL, ErrorKind.NOT_FOUND}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Everything of one place, as the API had it after `asked_at`."""

    asked_at: float
    """Unix time just before the requests were sent: what was written before it is in the listing."""

    version: ApiVersion = ApiVersion.V2ALPHA1
    """The version of the API that it is by. Version v2 shows neither maintenance nor autocheckpoint."""

    refusal: str = ""
    """Code of the error with which v2alpha1 refuses to list the place; empty: it does."""

    resources: dict[str, CloudQueuedResource] = field(default_factory=dict)
    """Queued resources by id."""

    nodes: dict[str, CloudNode] = field(default_factory=dict)
    """Nodes by id."""


@dataclass(slots=True)
class _Lists:
    """The lists of a place."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    listing: Listing | None = None
    failed: tuple[float, CloudTPUError] | None = None
    refused: tuple[float, CloudTPUError] | None = None
    """When v2alpha1 was refused, and how."""


class Poller:
    """Share the lists of each place among all resources there."""

    def __init__(self, cloud: CloudTPU, *, clock: Callable[[], float] = time.time) -> None:
        self._cloud = cloud
        self._clock = clock
        self._lists: dict[Place, _Lists] = {}

    async def list_place(self, place: Place, *, newer_than: float) -> Listing:
        """Return a listing that was asked for after `newer_than`, a Unix time. Whoever comes meanwhile shares it.

        It is by v2alpha1, which shows all that v2 shows, whatever versions the resources were made by. Where v2alpha1
        is refused, it is by v2.

        Raises:
            CloudTPUError: The place can't be listed. The error answers for some seconds.
        """
        lists = self._lists.setdefault(place, _Lists())
        async with lists.lock:
            if lists.listing is not None and lists.listing.asked_at > newer_than:
                return lists.listing
            now = self._clock()
            if lists.failed is not None and 0 <= now - lists.failed[0] < _ERROR_KEPT_S:
                raise lists.failed[1]
            try:
                lists.listing = await self._list_by_best(lists, place, now)
            except CloudTPUError as error:
                lists.failed = (self._clock(), error)
                raise
            lists.failed = None
            return lists.listing

    def forget_place(self, place: Place) -> None:
        """Forget the listings of a place that no object is in any more."""
        self._lists.pop(place, None)

    async def _list_by_best(self, lists: _Lists, place: Place, now: float) -> Listing:
        """List by v2alpha1; where that was refused a short while ago, by v2."""
        refused = known = lists.refused
        lists.refused = None
        if refused is None or now - refused[0] >= _REFUSAL_KEPT_S:
            try:
                return await self._list(place, ApiVersion.V2ALPHA1, now)
            except CloudTPUError as error:
                if error.kind not in _REFUSALS:
                    raise
                refused = (now, error)
        # What is refused by both versions says nothing about v2alpha1.
        listing = await self._list(place, ApiVersion.V2, now, refusal=refused[1].code)
        if known is None:
            extra = {"place": place.parent, "error": str(refused[1])}
            _log.warning("v2alpha1 doesn't list, asking v2", extra=extra)
        lists.refused = refused
        return listing

    async def _list(self, place: Place, version: ApiVersion, now: float, *, refusal: str = "") -> Listing:
        # Nodes first: a node that is listed belongs to a resource that the second list still shows, or that is gone.
        nodes = await self._cloud.list_nodes(place, version)
        resources = await self._cloud.list_queued_resources(place, version)
        return Listing(
            asked_at=now,
            version=version,
            refusal=refusal,
            resources={resource.id: resource for resource in resources},
            nodes={node.id: node for node in nodes},
        )
