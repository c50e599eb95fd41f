"""Hold the lists of the cloud against the objects.

What a list leaves out is asked for by name: one short list must destroy nothing, and let go of nothing. What it shows
of an object that is gone is told.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, TypeVar

from stepkeeper_operator.api.v1alpha1.metadata import ObjectMeta
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudNode,
    CloudTPU,
    CloudTPUError,
    Place,
)
from stepkeeper_operator.cloud_tpu.polling import Listing
from stepkeeper_operator.cluster import QUEUED_RESOURCES
from stepkeeper_operator.metrics import QueuedResourceMetrics
from stepkeeper_operator.queued_resources.naming import (
    CLUSTER_LABEL,
    UID_LABEL,
    make_cloud_id,
    parse_number,
)
from stepkeeper_operator.queued_resources.observed import Member
from stepkeeper_operator.queued_resources.sight import find_labels
from stepkeeper_operator.queued_resources.subject import Subject

__all__ = ["OrphanWatch", "complete_listing", "read_by_name"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_AT_ONCE: Final = 8
_INVALID: Final = "INVALID_ARGUMENT"


async def complete_listing(
    cloud: CloudTPU, listing: Listing, subject: Subject, members: Iterable[Member], place: Place
) -> Listing:
    """Return the listing with everything that exists of an object, by the same version of the API.

    What the list leaves out is asked for by name. Raises CloudTPUError.
    """
    bookkeeping = subject.status.bookkeeping
    leaving = subject.meta.deletion_timestamp is not None or bool(bookkeeping.removing)
    ids = {make_cloud_id(subject.meta.namespace, subject.meta.name, bookkeeping.number)}
    known = listing.resources.keys() & ids and bookkeeping.created and not bookkeeping.adopting
    names: set[str] = set()
    if known:
        (found,) = (listing.resources[name] for name in ids)
        active = found.state == "ACTIVE" and bookkeeping.active_since is not None and not leaving
        names.update(
            found.node_ids if active or bookkeeping.adopted else ()
        )  # an adopted one's label is on them
    else:
        names.update(member.cloud_node for member in members if member.cloud_node)
        if not (names or leaving or bookkeeping.created or bookkeeping.identity or bookkeeping.released):
            return listing  # nothing was asked for, as far as anybody knows
        if bookkeeping.adopting:  # its label may be there
            ids.add(bookkeeping.identity.partition("@")[0])
        if leaving or bookkeeping.adopting:  # the labels of their nodes say whose they are
            names |= _list_node_ids_of_name(subject.meta, listing)
    nodes = await _get_nodes(cloud, listing, names, place)
    ids |= {node.queued_resource.rpartition("/")[2] for node in nodes.values()} - {""}
    resources = await _get_all(
        ids - listing.resources.keys(), lambda name: cloud.get_queued_resource(place, name, listing.version)
    )
    theirs = {name for each in resources.values() for name in each.node_ids}
    nodes |= await _get_nodes(cloud, listing, theirs - nodes.keys(), place)
    return replace(listing, resources=listing.resources | resources, nodes=listing.nodes | nodes)


def _list_node_ids_of_name(meta: ObjectMeta, listing: Listing) -> set[str]:
    found = listing.resources.values()
    of_name = (each for each in found if parse_number(meta.namespace, meta.name, each.id) is not None)
    return {name for each in of_name for name in each.node_ids}


async def _get_nodes(
    cloud: CloudTPU, listing: Listing, names: set[str], place: Place
) -> dict[str, CloudNode]:
    async def get(name: str) -> CloudNode | None:
        try:
            return await cloud.get_node(place, name, listing.version)
        except CloudTPUError as error:
            if error.code != _INVALID:
                raise
            return None  # a name from a label of a Kubernetes node, which no cloud node can have

    return await _get_all(names - listing.nodes.keys(), get)


async def read_by_name(
    cloud: CloudTPU, place: Place, cloud_id: str, version: ApiVersion, *, at: float
) -> Listing:
    """Read a resource and its nodes: a listing of nothing else. Raises CloudTPUError."""
    found = await cloud.get_queued_resource(place, cloud_id, version)
    if found is None:
        return Listing(asked_at=at, version=version)
    nodes = await _get_all(found.node_ids, lambda name: cloud.get_node(place, name, version))
    return Listing(asked_at=at, version=version, resources={cloud_id: found}, nodes=nodes)


async def _get_all(names: Iterable[str], get: Callable[[str], Awaitable[T | None]]) -> dict[str, T]:
    """Return what there is of these names. Several are asked for at a time. Raises the first error."""
    slots = asyncio.Semaphore(_MOST_AT_ONCE)

    async def get_one(name: str) -> tuple[str, T | None]:
        async with slots:
            return name, await get(name)

    answers = await asyncio.gather(*(get_one(name) for name in sorted(names)))
    return {name: found for name, found in answers if found is not None}


class OrphanWatch:
    """Tell of cloud resources of this cluster whose object is gone: they cost money, and nobody here deletes them."""

    def __init__(self, cache: Cache, metrics: QueuedResourceMetrics) -> None:
        self._cache = cache
        self._metrics = metrics
        self._told: dict[Place, frozenset[str]] = {}

    def look(self, place: Place, listing: Listing, *, cluster_id: str) -> None:
        """Count the orphans of a listing, and log each that is new."""
        uids = self._cache.list_uids(QUEUED_RESOURCES)
        orphans = [
            each
            for each in listing.resources.values()
            if each.state != "DELETING" and _is_orphan(find_labels(each, listing), uids, cluster_id)
        ]
        known = self._told.get(place, frozenset())
        for orphan in (each for each in orphans if each.name not in known):
            text = "cloud resource of this cluster whose object is gone: it costs money until somebody deletes it"
            _log.warning(text, extra={"resource": orphan.name, "state": orphan.state})
        self._told[place] = frozenset(orphan.name for orphan in orphans)
        self._metrics.record_orphans(place.project, place.zone, len(orphans))

    def forget_place(self, place: Place) -> None:
        """Forget a place that no object is in any more."""
        self._told.pop(place, None)


def _is_orphan(labels: Mapping[str, str], uids: frozenset[str], cluster_id: str) -> bool:
    return labels.get(CLUSTER_LABEL) == cluster_id and labels.get(UID_LABEL) not in uids
