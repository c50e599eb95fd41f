"""Find in a place's listing what belongs to one QueuedResource. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from stepkeeper_operator.api.v1alpha1.metadata import ObjectMeta
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceBookkeeping
from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudQueuedResource
from stepkeeper_operator.cloud_tpu.polling import Listing
from stepkeeper_operator.queued_resources.naming import (
    CLUSTER_LABEL,
    NAME_LABEL,
    NAMESPACE_LABEL,
    UID_LABEL,
    make_cloud_id,
)
from stepkeeper_operator.queued_resources.observed import Observed
from stepkeeper_operator.queued_resources.settings import CloudSettings

__all__ = [
    "Presence",
    "Scene",
    "Sight",
    "find_labels",
    "identify",
    "is_ours",
    "list_live",
    "look_at",
    "was_let_go",
]


class Presence(StrEnum):
    """The thing that there is under the id of the present cloud resource."""

    UNKNOWN = "Unknown"
    """There is no listing."""

    ABSENT = "Absent"
    OURS = "Ours"
    FOREIGN = "Foreign"
    """Something that doesn't carry the object's label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The part of a listing that is about one object."""

    presence: Presence
    resource: CloudQueuedResource | None = None
    """The resource under the id, whoever made it."""

    nodes: tuple[CloudNode, ...] = ()
    """Nodes of it."""

    unlabelled: tuple[CloudNode, ...] = ()
    """Those of them that don't carry our label, where neither the request does."""

    leftovers: tuple[CloudNode, ...] = ()
    """Other nodes that carry our label."""

    strays: tuple[CloudQueuedResource, ...] = ()
    """Resources under other ids that are ours: answers to requests that came later than anybody waited."""

    others: tuple[CloudQueuedResource, ...] = ()
    """Resources of this name that aren't ours: first the one under the id, then those of former objects of the name."""

    @property
    def is_ours(self) -> bool:
        return self.presence is Presence.OURS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything that a plan is made from, besides the object's spec and status."""

    meta: ObjectMeta
    observed: Observed
    sight: Sight
    settings: CloudSettings
    now: float


def look_at(observed: Observed, meta: ObjectMeta, bookkeeping: QueuedResourceBookkeeping) -> Sight:
    """Find what is under the id of the present cloud resource, and everything else that carries the object's label."""
    listing, cloud_id = observed.listing, make_cloud_id(meta.namespace, meta.name, bookkeeping.number)
    if listing is None:
        return Sight(presence=Presence.UNKNOWN)
    found = listing.resources.get(cloud_id)
    live = () if found is None else list_live(found, listing)
    presence = Presence.ABSENT
    if found is not None:
        ours = is_ours(found, listing, meta, bookkeeping)
        presence = Presence.OURS if ours else Presence.FOREIGN
    nodes, leftovers = _sort_nodes(listing, meta, cloud_id, live, presence)
    asked = found is not None and _uid_of(_labels_of(found)) == meta.uid
    return Sight(
        presence=presence,
        resource=found,
        nodes=nodes,
        unlabelled=() if asked else tuple(node for node in nodes if _uid_of(node.labels) != meta.uid),
        leftovers=leftovers,
        strays=tuple(
            each
            for each in listing.resources.values()
            if each.id != cloud_id and is_ours(each, listing, meta, bookkeeping)
        ),
        others=_list_others(observed, listing, meta, found if presence is Presence.FOREIGN else None),
    )


def find_labels(found: CloudQueuedResource, listing: Listing) -> Mapping[str, str]:
    """Find the labels that say whose a resource is.

    Those of its request can't be changed. So the label of its first labelled node counts, which adoption writes;
    without one, the request's.
    """
    live = (node.labels for node in list_live(found, listing) if _uid_of(node.labels))
    return next(live, _labels_of(found))


def list_live(found: CloudQueuedResource, listing: Listing) -> tuple[CloudNode, ...]:
    """List the nodes that exist of a resource, in the order of its request."""
    listed = (listing.nodes.get(name) for name in found.node_ids)
    owners = {"", found.id}
    return tuple(n for n in listed if n is not None and n.queued_resource.rpartition("/")[2] in owners)


def identify(found: CloudQueuedResource) -> str:
    """Tell it from another one that was made under the same id later."""
    return f"{found.id}@{found.create_time}"


def was_let_go(found: CloudQueuedResource, bookkeeping: QueuedResourceBookkeeping) -> bool:
    """Return True for what another object has taken over from this one."""
    return identify(found) in bookkeeping.released


def is_ours(
    found: CloudQueuedResource, listing: Listing, meta: ObjectMeta, bookkeeping: QueuedResourceBookkeeping
) -> bool:
    """Return True for what carries the object's label.

    Of what the object has adopted, or let go, the nodes carry the label. Where there are none, the label of the request
    says nothing, and the bookkeeping counts.
    """
    live = list_live(found, listing)
    if not live and bookkeeping.created and bookkeeping.adopted and identify(found) == bookkeeping.identity:
        return True
    labelled = any(_uid_of(node.labels) for node in live)
    counts = labelled or not was_let_go(found, bookkeeping)
    return counts and _uid_of(find_labels(found, listing)) == meta.uid


def _sort_nodes(
    listing: Listing, meta: ObjectMeta, cloud_id: str, live: tuple[CloudNode, ...], presence: Presence
) -> tuple[tuple[CloudNode, ...], tuple[CloudNode, ...]]:
    """Find the nodes of the present resource, unless that is another's, and the other nodes that carry our label."""
    nodes, leftovers = [], []
    for node in sorted(listing.nodes.values(), key=_natural):
        of_it = node.queued_resource.rpartition("/")[2] == cloud_id or node in live
        if of_it and presence is not Presence.FOREIGN:
            nodes.append(node)
        elif not of_it and _uid_of(node.labels) == meta.uid:
            leftovers.append(node)
    return tuple(nodes), tuple(leftovers)


def _list_others(
    observed: Observed, listing: Listing, meta: ObjectMeta, foreign: CloudQueuedResource | None
) -> tuple[CloudQueuedResource, ...]:
    name = {CLUSTER_LABEL: observed.cluster_id, NAMESPACE_LABEL: meta.namespace, NAME_LABEL: meta.name}
    relics = []
    for each in listing.resources.values():
        labels = find_labels(each, listing)
        former = name.items() <= labels.items() and _uid_of(labels) != meta.uid
        if former and each != foreign:
            relics.append(each)
    return (*(() if foreign is None else (foreign,)), *relics)


def _uid_of(labels: Mapping[str, str]) -> str:
    return labels.get(UID_LABEL, "")


def _labels_of(resource: CloudQueuedResource) -> Mapping[str, str]:
    labels: Mapping[str, str] = resource.node.get("labels", {})
    return labels


def _natural(node: CloudNode) -> tuple[str, int, str]:
    """Sort prefix-2 before prefix-10."""
    prefix, _, index = node.id.rpartition("-")
    return (prefix, int(index), node.id) if index.isdecimal() else (node.id, -1, node.id)
