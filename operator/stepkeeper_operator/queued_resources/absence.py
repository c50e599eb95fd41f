"""Compare the cloud's lists with the objects.

Anything that is missing from a list is read by name: one incomplete list must not delete or release anything. Cloud
resources without an object are counted.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudTPU, Place
from stepkeeper_operator.cloud_tpu.naming import CLUSTER_LABEL, NAMESPACE_LABEL, UID_LABEL, make_cloud_id
from stepkeeper_operator.cloud_tpu.polling import Listing
from stepkeeper_operator.cluster.resources import QUEUED_RESOURCES
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.metrics import QueuedResourceMetrics
from stepkeeper_operator.queued_resources.cloud_view import find_labels
from stepkeeper_operator.queued_resources.subject import Subject

__all__ = ["OrphanWatch", "complete_listing", "read_by_name"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_CONCURRENT: Final = 8
_CLOUD_ID: Final = re.compile(r"[a-z][a-z0-9-]*")
"""Valid ids of cloud nodes. The label of a Kubernetes node may have any other text."""


async def complete_listing(
    cloud: CloudTPU, listing: Listing, subject: Subject, members: Iterable[Node], place: Place
) -> Listing:
    """Return the listing with the object's resources and nodes that it lacks, read by name. Raises CloudTPUError.

    The resources are the current one and the one being adopted. The nodes are theirs; if there is no current one, also
    the cloud nodes that the cluster's nodes name.
    """
    meta, operator = subject.meta, subject.status.operator
    owned = operator.created and not operator.adopting
    hosts = {each.slice_id for each in members if _CLOUD_ID.fullmatch(each.slice_id)}
    ends = bool(subject.status.removing) or meta.deletion_timestamp is not None
    # If there are hosts, there may be a resource whose object's status has been emptied.
    if not (owned or operator.adopting or ends or hosts):
        return listing
    current = make_cloud_id(meta.namespace, meta.name, operator.number)
    ids = {current, operator.identity.partition("@")[0] if operator.adopting else ""} - {""}
    resources = listing.resources | await _get_all(
        ids - listing.resources.keys(), lambda name: cloud.get_queued_resource(place, name, listing.version)
    )
    had_nodes = subject.status.active_since is not None
    names = set[str]()
    for found in (resources[name] for name in ids & resources.keys()):
        # The labels of nodes show the owner. If that is known, only an active resource must have all its nodes.
        if not owned or (had_nodes and found.phase is QueuedResourceState.ACTIVE):
            names.update(found.node_ids)
    if current not in resources:
        names |= hosts
    nodes = listing.nodes | await _get_all(
        names - listing.nodes.keys(), lambda name: cloud.get_node(place, name, listing.version)
    )
    return replace(listing, resources=resources, nodes=nodes)


async def read_by_name(cloud: CloudTPU, place: Place, cloud_id: str, version: ApiVersion) -> Listing:
    """Read one resource and its nodes into a listing. Raises CloudTPUError."""
    found = await cloud.get_queued_resource(place, cloud_id, version)
    if found is None:
        return Listing(asked_at=0.0)
    nodes = await _get_all(found.node_ids, lambda name: cloud.get_node(place, name, version))
    return Listing(asked_at=0.0, resources={cloud_id: found}, nodes=nodes)


async def _get_all(names: Iterable[str], get: Callable[[str], Awaitable[T | None]]) -> dict[str, T]:
    """Read the objects with these names that exist, several at a time. Raises the first error."""
    slots = asyncio.Semaphore(_MAX_CONCURRENT)

    async def get_one(name: str) -> tuple[str, T | None]:
        async with slots:
            return name, await get(name)

    answers = await asyncio.gather(*(get_one(name) for name in sorted(names)))
    return {name: found for name, found in answers if found is not None}


class OrphanWatch:
    """Count cloud resources of this cluster without an object: they cost money, and the operator deletes none."""

    def __init__(self, cache: Cache, metrics: QueuedResourceMetrics, *, watched: Sequence[str]) -> None:
        """Make a watch that counts only resources of the `watched` namespaces; empty: of all."""
        self._cache = cache
        self._metrics = metrics
        self._watched = watched
        self._logged: dict[Place, set[str]] = {}

    def update(self, place: Place, listing: Listing, *, cluster_id: str) -> None:
        """Count the orphans of a listing, and log each new one."""
        uids = self._cache.list_uids(QUEUED_RESOURCES)
        orphans, known = set[str](), self._logged.get(place, set())
        for each in listing.resources.values():
            labels = find_labels(each, listing)
            ours = labels.get(CLUSTER_LABEL) == cluster_id and labels.get(UID_LABEL) not in uids
            ours = ours and (not self._watched or labels.get(NAMESPACE_LABEL) in self._watched)
            if ours and each.phase is not QueuedResourceState.DELETING:
                orphans.add(each.name)
                if each.name not in known:
                    text = "cloud resource of this cluster has no QueuedResource: it costs money until it is deleted"
                    _log.warning(text, extra={"resource": each.name, "state": each.state})
        self._logged[place] = orphans
        self._metrics.record_orphans(place.project, place.zone, len(orphans))
