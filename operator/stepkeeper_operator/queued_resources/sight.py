"""Find in a place's listing what belongs to one QueuedResource. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from stepkeeper_operator.api.base import ObjectMeta
from stepkeeper_operator.api.v1alpha1.queuedresource_status import ResourceOperatorState
from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudQueuedResource
from stepkeeper_operator.cloud_tpu.naming import UID_LABEL, make_cloud_id, make_labels
from stepkeeper_operator.cloud_tpu.polling import Listing
from stepkeeper_operator.queued_resources.observed import Observed
from stepkeeper_operator.queued_resources.settings import CloudSettings

__all__ = ["Scene", "Sight", "find_labels", "identify", "is_ours", "list_live", "look_at"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The part of a listing that is about one object."""

    known: bool = True
    """There is a listing."""

    resource: CloudQueuedResource | None = None
    """The resource under the present id, if it is ours."""

    foreign: CloudQueuedResource | None = None
    """Something under the present id that doesn't carry the object's label."""

    nodes: tuple[CloudNode, ...] = ()
    """Nodes of it."""

    unlabelled: tuple[CloudNode, ...] = ()
    """Those of them that don't carry our label, where we have adopted it."""

    leftovers: tuple[CloudNode, ...] = ()
    """Other nodes that carry our label."""

    strays: tuple[CloudQueuedResource, ...] = ()
    """Resources under other ids that are ours: answers to requests that came later than anybody waited."""

    others: tuple[CloudQueuedResource, ...] = ()
    """Resources of this name that aren't ours: first the one under the id, then those of former objects of the name."""

    @property
    def absent(self) -> bool:
        """True if there is nothing under the present id for certain."""
        return self.known and self.resource is None and self.foreign is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything that a plan is made from, besides the object's spec and status."""

    meta: ObjectMeta
    observed: Observed
    sight: Sight
    settings: CloudSettings
    now: float


def look_at(observed: Observed, meta: ObjectMeta, operator: ResourceOperatorState) -> Sight:
    """Find what is under the id of the present cloud resource, and everything else that carries the object's label."""
    listing, cloud_id = observed.listing, make_cloud_id(meta.namespace, meta.name, operator.number)
    if listing is None:
        return Sight(known=False)
    ours = {name: each for name, each in listing.resources.items() if is_ours(each, listing, meta, operator)}
    found, resource = listing.resources.get(cloud_id), ours.pop(cloud_id, None)
    foreign = found if resource is None else None
    live = () if found is None else list_live(found, listing)
    nodes = listing.nodes.values()
    present = (*live, *(n for n in nodes if _id_of(n.queued_resource) == cloud_id and n not in live))
    shown = present if foreign is None else ()
    return Sight(
        resource=resource,
        foreign=foreign,
        nodes=shown,
        unlabelled=tuple(n for n in shown if operator.adopted and _uid_of(n.labels) != meta.uid),
        leftovers=tuple(n for n in nodes if _uid_of(n.labels) == meta.uid and n not in present),
        strays=tuple(ours.values()),
        others=_list_others(listing, meta, observed.cluster_id, foreign),
    )


def find_labels(found: CloudQueuedResource, listing: Listing) -> Mapping[str, str]:
    """Find the labels that name the owner of a resource.

    Those of its request can't be changed. So the label of its first labelled node counts, which adoption writes;
    without one, the request's.
    """
    live = (node.labels for node in list_live(found, listing) if _uid_of(node.labels))
    return next(live, _labels_of(found))


def list_live(found: CloudQueuedResource, listing: Listing) -> tuple[CloudNode, ...]:
    """List the nodes that exist of a resource, in the order of its request."""
    listed = (listing.nodes.get(name) for name in found.node_ids)
    return tuple(n for n in listed if n is not None and _id_of(n.queued_resource) in {"", found.id})


def identify(found: CloudQueuedResource) -> str:
    """Tell it from another one that was made under the same id later."""
    return f"{found.id}@{found.create_time}"


def is_ours(
    found: CloudQueuedResource, listing: Listing, meta: ObjectMeta, operator: ResourceOperatorState
) -> bool:
    """Return True for what carries the object's label.

    Of what was adopted, or taken over, the nodes carry the label. While there are none, `operator` counts.
    """
    if identify(found) == operator.identity and not list_live(found, listing):
        return operator.adopted
    return _uid_of(find_labels(found, listing)) == meta.uid


def _list_others(
    listing: Listing, meta: ObjectMeta, cluster_id: str, foreign: CloudQueuedResource | None
) -> tuple[CloudQueuedResource, ...]:
    others = [] if foreign is None else [foreign]
    name = {key: value for key, value in make_labels(meta, cluster_id).items() if key != UID_LABEL}
    for each in listing.resources.values():
        labels = find_labels(each, listing)
        if name.items() <= labels.items() and _uid_of(labels) != meta.uid and each != foreign:
            others.append(each)
    return tuple(others)


def _uid_of(labels: Mapping[str, str]) -> str:
    return labels.get(UID_LABEL, "")


def _id_of(name: str) -> str:
    return name.rpartition("/")[2]


def _labels_of(resource: CloudQueuedResource) -> Mapping[str, str]:
    labels: Mapping[str, str] = resource.node.get("labels", {})
    return labels
