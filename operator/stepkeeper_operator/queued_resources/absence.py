"""Hold the lists of the cloud against the objects.

What a list leaves out is asked for by name: one short list must destroy nothing, and let go of nothing. What it shows
of an object that is gone is told.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from stepkeeper_operator.api.v1alpha1.metadata import ObjectMeta
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudNode,
    CloudQueuedResource,
    CloudTPU,
    CloudTPUError,
    Place,
)
from stepkeeper_operator.cloud_tpu.polling import Listing
from stepkeeper_operator.cluster import QUEUED_RESOURCES
from stepkeeper_operator.metrics import QueuedResourceMetrics
from stepkeeper_operator.queued_resources.memory import ResourceMemory
from stepkeeper_operator.queued_resources.naming import (
    CLUSTER_LABEL,
    UID_LABEL,
    make_cloud_id,
    parse_number,
)
from stepkeeper_operator.queued_resources.observed import Member
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.queued_resources.sight import find_labels
from stepkeeper_operator.queued_resources.subject import Subject

__all__ = ["AbsenceCheck", "Expected", "OrphanWatch", "find_expected", "read_by_name"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_UNSEEN: Final = {None, QueuedResourceState.PENDING, QueuedResourceState.GONE}
_MOST_AT_ONCE: Final = 8
_INVALID: Final = "INVALID_ARGUMENT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The ids that a listing should show: much follows from the absence of these."""

    resources: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    twice: bool = False
    """Their absence destroys machines: it counts once it was seen twice, some time apart."""


def find_expected(subject: Subject, members: Iterable[Member], listing: Listing) -> Expected:
    """Find what the listing should show of an object, from its status and its nodes of this cluster."""
    bookkeeping = subject.status.bookkeeping
    leaving = subject.meta.deletion_timestamp is not None or bool(bookkeeping.removing)
    ids: tuple[str, ...] = (make_cloud_id(subject.meta.namespace, subject.meta.name, bookkeeping.number),)
    if bookkeeping.adopting:  # its label may be there
        ids = (bookkeeping.identity.partition("@")[0], *ids)
    found = listing.resources.get(ids[-1])
    if found is not None and bookkeeping.created and not bookkeeping.adopting:
        known = found.state == "ACTIVE" and bookkeeping.active_since is not None and not leaving
        known = known or bookkeeping.adopted  # the label is on its nodes
        return Expected(nodes=found.node_ids if known else (), twice=True)
    names = {member.cloud_node for member in members if member.cloud_node}
    begun = bookkeeping.created or bookkeeping.identity
    if not (begun or leaving or names):
        return Expected()  # nothing was asked for, as far as anybody knows
    if leaving or bookkeeping.adopting:  # the labels of their nodes say whose they are
        names |= _list_node_ids_of_name(subject.meta, listing)
    nodes = tuple(sorted(names))
    seen = bookkeeping.created and subject.status.state not in _UNSEEN
    return Expected(resources=ids, nodes=nodes, twice=seen and not leaving)


def _list_node_ids_of_name(meta: ObjectMeta, listing: Listing) -> set[str]:
    found = listing.resources.values()
    of_name = (each for each in found if parse_number(meta.namespace, meta.name, each.id) is not None)
    return {name for each in of_name for name in each.node_ids}


class AbsenceCheck:
    """Complete listings with what can be read by its name."""

    def __init__(self, cloud: CloudTPU, settings: CloudSettings, *, clock: Callable[[], float]) -> None:
        self._cloud = cloud
        self._settings = settings
        self._clock = clock

    async def complete(
        self, listing: Listing, expected: Expected, memory: ResourceMemory, place: Place
    ) -> Listing | None:
        """Return the listing with everything that exists of what is expected, by the same version of the API.

        None: something is missing for the first time that has to be missed twice. Raises CloudTPUError.
        """
        nodes, resources = await self._get_unlisted(listing, expected, place)
        missing = {f"nodes/{name}" for name in expected.nodes if name in nodes and nodes[name] is None}
        missing |= {name for name in expected.resources if name in resources and resources[name] is None}
        now = self._clock()
        memory.missed = {name: memory.missed.get(name, now) for name in missing}
        if expected.twice and any(now - first < self._settings.confirm_s for first in memory.missed.values()):
            return None
        return replace(
            listing,
            resources=listing.resources
            | {name: item for name, item in resources.items() if item is not None},
            nodes=listing.nodes | {name: item for name, item in nodes.items() if item is not None},
        )

    async def _get_unlisted(
        self, listing: Listing, expected: Expected, place: Place
    ) -> tuple[dict[str, CloudNode | None], dict[str, CloudQueuedResource | None]]:
        nodes = await self._get_nodes(expected.nodes, listing, place)
        owners = {node.queued_resource.rpartition("/")[2] for node in nodes.values() if node is not None}
        wanted = {*expected.resources, *owners} - {""}
        resources = await _get_all(
            (name for name in wanted if name not in listing.resources),
            lambda name: self._cloud.get_queued_resource(place, name, listing.version),
        )
        theirs = {name for found in resources.values() if found is not None for name in found.node_ids}
        return nodes | await self._get_nodes(theirs - nodes.keys(), listing, place), resources

    async def _get_nodes(
        self, names: Iterable[str], listing: Listing, place: Place
    ) -> dict[str, CloudNode | None]:
        return await _get_all(
            (name for name in names if name not in listing.nodes),
            lambda name: self._get_node(place, name, listing.version),
        )

    async def _get_node(self, place: Place, name: str, version: ApiVersion) -> CloudNode | None:
        try:
            return await self._cloud.get_node(place, name, version)
        except CloudTPUError as error:
            if error.code != _INVALID:
                raise
            return None  # a name from a label of a Kubernetes node, which no cloud node can have


async def read_by_name(
    cloud: CloudTPU, place: Place, cloud_id: str, version: ApiVersion, *, at: float
) -> Listing:
    """Read a resource and its nodes: a listing of nothing else. Raises CloudTPUError."""
    found = await cloud.get_queued_resource(place, cloud_id, version)
    if found is None:
        return Listing(asked_at=at, version=version)
    nodes = await _get_all(found.node_ids, lambda name: cloud.get_node(place, name, version))
    return Listing(
        asked_at=at,
        version=version,
        resources={cloud_id: found},
        nodes={name: node for name, node in nodes.items() if node is not None},
    )


async def _get_all(names: Iterable[str], get: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """Ask for all names, several at a time. Raises the first error."""
    slots = asyncio.Semaphore(_MOST_AT_ONCE)

    async def get_one(name: str) -> tuple[str, T]:
        async with slots:
            return name, await get(name)

    return dict(await asyncio.gather(*(get_one(name) for name in sorted(names))))


class OrphanWatch:
    """Tell of cloud resources of this cluster whose object is gone: they cost money, and nobody here deletes them."""

    def __init__(self, cache: Cache, metrics: QueuedResourceMetrics) -> None:
        self._cache = cache
        self._metrics = metrics
        self._seen: dict[Place, Listing] = {}
        self._told: dict[Place, frozenset[str]] = {}

    def look(self, place: Place, listing: Listing, *, cluster_id: str) -> None:
        """Count the orphans of a listing, and log each that is new."""
        if self._seen.get(place) is listing:
            return
        self._seen[place] = listing
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
        self._seen.pop(place, None)
        self._told.pop(place, None)


def _is_orphan(labels: Mapping[str, str], uids: frozenset[str], cluster_id: str) -> bool:
    return labels.get(CLUSTER_LABEL) == cluster_id and labels.get(UID_LABEL) not in uids
