"""List the resources of a place once for all of its objects, and share the answer for a while."""

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
"""Seconds for which the error of a failed list is shared: 200 resources of a place send one request, not 200."""

_REFUSAL_KEPT_S: Final = 300.0
"""Seconds until v2alpha1 is tried again after a refusal, which lasts until a person grants a permission."""

_REFUSALS: Final = {ErrorKind.TERMINAL, ErrorKind.NOT_FOUND}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All resources and nodes of one place, as the API reported them after `asked_at`."""

    asked_at: float
    """Unix time just before the requests were sent: the listing includes all earlier writes."""

    version: ApiVersion = ApiVersion.V2ALPHA1
    """The version of the API that was used. Version v2 reports neither maintenance nor autocheckpoint."""

    refusal: str = ""
    """Code of the error with which v2alpha1 refused the list; empty: it didn't."""

    resources: dict[str, CloudQueuedResource] = field(default_factory=dict)
    nodes: dict[str, CloudNode] = field(default_factory=dict)
    """Both are by id."""


@dataclass(slots=True)
class _Lists:
    """The last listing of a place, or errors of the last requests for one, each with its Unix time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    listing: Listing | None = None
    failed: tuple[float, CloudTPUError] | None = None
    refused: tuple[float, CloudTPUError] | None = None
    """The last refusal by v2alpha1."""


class Poller:
    """Share the lists of each place among all of its resources."""

    def __init__(self, cloud: CloudTPU, *, clock: Callable[[], float] = time.time) -> None:
        self._cloud = cloud
        self._clock = clock
        self._lists: dict[Place, _Lists] = {}

    async def list_place(self, place: Place, *, newer_than: float) -> Listing:
        """Return a listing that was requested after `newer_than`, a Unix time. Concurrent callers share it.

        It uses v2alpha1, which lists the resources of both versions, or v2 if v2alpha1 is refused.

        Raises:
            CloudTPUError: The place can't be listed. The error is shared for some seconds.
        """
        lists = self._lists.setdefault(place, _Lists())
        async with lists.lock:
            if lists.listing is not None and lists.listing.asked_at > newer_than:
                return lists.listing
            now = self._clock()
            # 0 <=: the clock may have been set back.
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
        """Forget the listings of a place that has no more objects."""
        self._lists.pop(place, None)

    async def _list_by_best(self, lists: _Lists, place: Place, now: float) -> Listing:
        """List with v2alpha1, or with v2 after a recent refusal."""
        refused, is_logged = lists.refused, lists.refused is not None
        # It is set again only if v2 answers. If v2 fails too, the refusal shows nothing about v2alpha1 alone.
        lists.refused = None
        if refused is None or now - refused[0] >= _REFUSAL_KEPT_S:
            try:
                return await self._list(place, ApiVersion.V2ALPHA1, now)
            except CloudTPUError as error:
                if error.kind not in _REFUSALS:
                    raise
                refused = (now, error)
        listing = await self._list(place, ApiVersion.V2, now, refusal=refused[1].code)
        if not is_logged:
            extra = {"place": place.parent, "error": str(refused[1])}
            _log.warning("cannot list with v2alpha1, using v2", extra=extra)
        lists.refused = refused
        return listing

    async def _list(self, place: Place, version: ApiVersion, now: float, *, refusal: str = "") -> Listing:
        # Nodes first: the resource of each listed node is then in the second list, unless it was deleted since.
        nodes = await self._cloud.list_nodes(place, version)
        resources = await self._cloud.list_queued_resources(place, version)
        return Listing(
            asked_at=now,
            version=version,
            refusal=refusal,
            resources={resource.id: resource for resource in resources},
            nodes={node.id: node for node in nodes},
        )
