"""Classify the resources and nodes in a place's listing for one QueuedResource. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from stepkeeper_operator.api.base import ObjectMeta
from stepkeeper_operator.api.v1alpha1.queuedresource_status import ResourceOperatorState
from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudQueuedResource
from stepkeeper_operator.cloud_tpu.naming import UID_LABEL, make_cloud_id, make_labels
from stepkeeper_operator.cloud_tpu.polling import Listing
from stepkeeper_operator.queued_resources.observed import Observed
from stepkeeper_operator.queued_resources.settings import CloudSettings

__all__ = ["CloudView", "View", "classify", "find_labels", "identify", "is_ours", "list_live"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudView:
    """One object's part of a listing.

    A queued resource or node is the object's own if it has the object's label. The current id is the id of the object's
    newest resource.
    """

    known: bool = True
    """True if there is a listing."""

    resource: CloudQueuedResource | None = None
    """The own resource under the current id."""

    foreign: CloudQueuedResource | None = None
    """A resource under the current id that isn't the object's own."""

    nodes: tuple[CloudNode, ...] = ()
    """Nodes of `resource`."""

    unlabeled: tuple[CloudNode, ...] = ()
    """Those of `nodes` that don't have the object's label yet, if it has adopted the resource."""

    leftovers: tuple[CloudNode, ...] = ()
    """Other own nodes."""

    duplicates: tuple[CloudQueuedResource, ...] = ()
    """Own resources under other ids: results of requests that were considered lost."""

    others: tuple[CloudQueuedResource, ...] = ()
    """First `foreign`, then resources whose labels have the same cluster, namespace and name, but another uid."""

    @property
    def absent(self) -> bool:
        """True if there is certainly no resource under the current id."""
        return self.known and self.resource is None and self.foreign is None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The input of a plan, besides the object's spec and status."""

    meta: ObjectMeta
    observed: Observed
    cloud: CloudView
    settings: CloudSettings
    now: float


def classify(observed: Observed, meta: ObjectMeta, operator: ResourceOperatorState) -> CloudView:
    """Classify the listed resources and nodes: the current one, other own ones, and those of other objects."""
    listing, cloud_id = observed.listing, make_cloud_id(meta.namespace, meta.name, operator.number)
    if listing is None:
        return CloudView(known=False)
    ours = {name: each for name, each in listing.resources.items() if is_ours(each, listing, meta, operator)}
    found, resource = listing.resources.get(cloud_id), ours.pop(cloud_id, None)
    foreign = found if resource is None else None
    live = () if found is None else list_live(found, listing)
    nodes = listing.nodes.values()
    # The nodes of the resource under the current id are those that it lists, and those that name it.
    present = (*live, *(n for n in nodes if _id_of(n.queued_resource) == cloud_id and n not in live))
    shown = present if foreign is None else ()
    return CloudView(
        resource=resource,
        foreign=foreign,
        nodes=shown,
        unlabeled=tuple(n for n in shown if operator.adopted and _uid_of(n.labels) != meta.uid),
        leftovers=tuple(n for n in nodes if _uid_of(n.labels) == meta.uid and n not in present),
        duplicates=tuple(ours.values()),
        others=_list_others(listing, meta, observed.cluster_id, foreign),
    )


def find_labels(found: CloudQueuedResource, listing: Listing) -> Mapping[str, str]:
    """Find the labels that name the owner of a resource.

    An adoption labels the resource's nodes, since the labels in its request can't be changed. So the labels of its
    first labeled node count; without such a node, those in the request.
    """
    live = (node.labels for node in list_live(found, listing) if _uid_of(node.labels))
    return next(live, found.node.get("labels", {}))


def list_live(found: CloudQueuedResource, listing: Listing) -> tuple[CloudNode, ...]:
    """List the existing nodes of a resource, in the order of its request. One that names another resource isn't one."""
    listed = (listing.nodes.get(name) for name in found.node_ids)
    return tuple(n for n in listed if n is not None and _id_of(n.queued_resource) in {"", found.id})


def identify(found: CloudQueuedResource) -> str:
    """Return an identity that differs from that of a later resource with the same id."""
    return f"{found.id}@{found.create_time}"


def is_ours(
    found: CloudQueuedResource, listing: Listing, meta: ObjectMeta, operator: ResourceOperatorState
) -> bool:
    """Return True if the resource has the object's label.

    An adoption labels only nodes. So for a resource without nodes, `operator`, the private status, has the answer.
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
