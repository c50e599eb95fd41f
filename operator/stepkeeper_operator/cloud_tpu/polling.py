"""List the resources of a place once for all objects that are there, and keep the answer for a while."""

import asyncio
import time
from collections.abc import Callable, Mapping
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

_ERROR_KEPT_S: Final = 5.0
"""Seconds for which a failed list answers for all who ask: 200 resources of a place send one request, not 200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Everything of one place, as the API had it after `asked_at`."""

    asked_at: float
    """Unix time just before the requests were sent: what was written before it is in the listing."""

    resources: Mapping[str, CloudQueuedResource] = field(default_factory=dict)
    """Queued resources by id."""

    nodes: Mapping[str, CloudNode] = field(default_factory=dict)
    """Nodes by id."""


@dataclass(slots=True)
class _PlaceState:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    version: ApiVersion = ApiVersion.V2
    listing: Listing | None = None
    failed: tuple[float, CloudTPUError] | None = None


class Poller:
    """Share the lists of each place among all resources there."""

    def __init__(self, cloud: CloudTPU, *, clock: Callable[[], float] = time.time) -> None:
        self._cloud = cloud
        self._clock = clock
        self._places: dict[Place, _PlaceState] = {}

    async def list_place(self, place: Place, version: ApiVersion, *, newer_than: float) -> Listing:
        """Return a listing that was asked for after `newer_than`, a Unix time. Whoever comes meanwhile shares it.

        Once a resource of the place needs v2alpha1, the place is listed with it: it shows all that v2 shows.

        Raises:
            CloudTPUError: The place can't be listed. The error answers for some seconds.
        """
        state = self._places.setdefault(place, _PlaceState())
        async with state.lock:
            if version is ApiVersion.V2ALPHA1 and state.version is ApiVersion.V2:
                state.version, state.listing = version, None
            if state.listing is not None and state.listing.asked_at > newer_than:
                return state.listing
            now = self._clock()
            if state.failed is not None and 0 <= now - state.failed[0] < _ERROR_KEPT_S:
                raise state.failed[1]
            try:
                state.listing = await self._list(place, state.version, now)
            except CloudTPUError as error:
                state.failed = (now, error)
                raise
            state.failed = None
            return state.listing

    def forget_place(self, place: Place) -> None:
        """Forget the listing of a place that no object is in any more."""
        self._places.pop(place, None)

    async def _list(self, place: Place, version: ApiVersion, now: float) -> Listing:
        # Nodes first: a node that is listed belongs to a resource that the second list still shows, or that is gone.
        nodes = await self._cloud.list_nodes(place, version)
        resources = await self._cloud.list_queued_resources(place, version)
        return Listing(
            asked_at=now,
            resources={resource.id: resource for resource in resources},
            nodes={node.id: node for node in nodes},
        )
