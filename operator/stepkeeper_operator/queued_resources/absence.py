"""Compare the lists of the cloud with the objects.

What a list leaves out is asked for by name: one short list must destroy nothing, and let go of nothing. What it shows
of an object that is gone is counted.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Final, TypeVar

from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudTPU, Place
from stepkeeper_operator.cloud_tpu.naming import CLUSTER_LABEL, UID_LABEL, make_cloud_id
from stepkeeper_operator.cloud_tpu.polling import Listing
from stepkeeper_operator.cluster import QUEUED_RESOURCES
from stepkeeper_operator.facts import Node
from stepkeeper_operator.metrics import QueuedResourceMetrics
from stepkeeper_operator.queued_resources.sight import find_labels
from stepkeeper_operator.queued_resources.subject import Subject

__all__ = ["OrphanWatch", "complete_listing", "read_by_name"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_AT_ONCE: Final = 8
_CLOUD_ID: Final = re.compile(r"[a-z][a-z0-9-]*")
"""What the cloud can name a node. The label of a Kubernetes node may name it something else."""


async def complete_listing(
    cloud: CloudTPU, listing: Listing, subject: Subject, members: Iterable[Node], place: Place
) -> Listing:
    """Return the listing with what it leaves out of an object, asked for by name and by the same version of the API.

    That is the present resource, and what is being adopted; then their nodes, once they have some. Where the present
    one is gone, it is the nodes that the cluster's nodes name. Raises CloudTPUError.
    """
    meta, operator = subject.meta, subject.status.operator
    known = operator.created and not operator.adopting
    hosts = {each.slice_id for each in members if _CLOUD_ID.fullmatch(each.slice_id)}
    asked = known or operator.adopting or subject.status.removing or meta.deletion_timestamp is not None
    if not (asked or hosts):  # somebody may have emptied the status of one that has hosts
        return listing
    present = make_cloud_id(meta.namespace, meta.name, operator.number)
    ids = {present, operator.identity.partition("@")[0] if operator.adopting else ""} - {""}
    resources = listing.resources | await _get_all(
        ids - listing.resources.keys(), lambda name: cloud.get_queued_resource(place, name, listing.version)
    )
    had_nodes = {"ACTIVE"} if subject.status.active_since is not None else set[str]()
    found = [resources[name] for name in ids & resources.keys()]
    names = {name for each in found if not known or each.state in had_nodes for name in each.node_ids}
    if present not in resources:
        names |= hosts
    nodes = listing.nodes | await _get_all(
        names - listing.nodes.keys(), lambda name: cloud.get_node(place, name, listing.version)
    )
    return replace(listing, resources=resources, nodes=nodes)


async def read_by_name(cloud: CloudTPU, place: Place, cloud_id: str, version: ApiVersion) -> Listing:
    """Read a resource and its nodes: a listing of nothing else. Raises CloudTPUError."""
    found = await cloud.get_queued_resource(place, cloud_id, version)
    if found is None:
        return Listing(asked_at=0.0)
    nodes = await _get_all(found.node_ids, lambda name: cloud.get_node(place, name, version))
    return Listing(asked_at=0.0, resources={cloud_id: found}, nodes=nodes)


async def _get_all(names: Iterable[str], get: Callable[[str], Awaitable[T | None]]) -> dict[str, T]:
    """Return what there is of these names. Several are asked for at a time. Raises the first error."""
    slots = asyncio.Semaphore(_MOST_AT_ONCE)

    async def get_one(name: str) -> tuple[str, T | None]:
        async with slots:
            return name, await get(name)

    answers = await asyncio.gather(*(get_one(name) for name in sorted(names)))
    return {name: found for name, found in answers if found is not None}


class OrphanWatch:
    """Count cloud resources of this cluster whose object is gone: they cost money, and aren't deleted."""

    def __init__(self, cache: Cache, metrics: QueuedResourceMetrics) -> None:
        self._cache = cache
        self._metrics = metrics
        self._logged: dict[Place, set[str]] = {}

    def look(self, place: Place, listing: Listing, *, cluster_id: str) -> None:
        """Count the orphans of a listing, and log each that is new."""
        uids = self._cache.list_uids(QUEUED_RESOURCES)
        orphans, known = set[str](), self._logged.get(place, set())
        for each in listing.resources.values():
            labels = find_labels(each, listing)
            ours = labels.get(CLUSTER_LABEL) == cluster_id and labels.get(UID_LABEL) not in uids
            if ours and each.state != "DELETING":
                orphans.add(each.name)
                if each.name not in known:
                    text = "cloud resource of this cluster whose object is gone: it costs money until it is deleted"
                    _log.warning(text, extra={"resource": each.name, "state": each.state})
        self._logged[place] = orphans
        self._metrics.record_orphans(place.project, place.zone, len(orphans))
