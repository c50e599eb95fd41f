"""Find in a place's listing what belongs to one QueuedResource. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.metadata import ObjectMeta
from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudQueuedResource
from stepkeeper_operator.queued_resources.naming import Owner, find_owner
from stepkeeper_operator.queued_resources.observed import Observed
from stepkeeper_operator.queued_resources.settings import CloudSettings

__all__ = ["Presence", "Scene", "Sight", "look_at"]


class Presence(StrEnum):
    """The thing that there is under the id of the present cloud resource."""

    UNKNOWN = "Unknown"
    """There is no listing."""

    ABSENT = "Absent"
    OURS = "Ours"
    UNLABELLED = "Unlabelled"
    """Something whose request nobody has labelled, and whose nodes carry nobody's labels but ours. It isn't adopted."""

    RELIC = "Relic"
    """Something of an earlier object of the same name, which is gone. We haven't adopted it."""

    FOREIGN = "Foreign"
    """Something of another cluster or another object, by its request or by its live nodes. It is never touched."""


_PRESENCES: Final = {
    Owner.OURS: Presence.OURS,
    Owner.UNLABELLED: Presence.UNLABELLED,
    Owner.RELIC: Presence.RELIC,
    Owner.FOREIGN: Presence.FOREIGN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The part of a listing that is about one object."""

    presence: Presence
    resource: CloudQueuedResource | None = None
    """The resource under the id, whoever made it."""

    nodes: tuple[CloudNode, ...] = ()
    """Nodes of it."""

    live: tuple[CloudNode, ...] = ()
    """All nodes of the resource, whoever's it is."""

    unlabelled: tuple[CloudNode, ...] = ()
    """Those of them that don't carry our labels, where neither the request does."""

    leftovers: tuple[CloudNode, ...] = ()
    """Other nodes that carry our labels."""

    strays: tuple[CloudQueuedResource, ...] = ()
    """Resources under other ids that carry our labels: answers to requests that came later than anybody waited."""

    relics: tuple[CloudQueuedResource, ...] = ()
    """Resources under other ids that an earlier object of the same name has left."""

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


def look_at(observed: Observed, meta: ObjectMeta, cloud_id: str, *, adopted: bool) -> Sight:
    """Find what is under `cloud_id`, and everything else that carries the object's labels."""
    if observed.listing is None:
        return Sight(presence=Presence.UNKNOWN)
    found = observed.listing.resources.get(cloud_id)
    presence = Presence.ABSENT if found is None else _judge(found, observed, meta, adopted=adopted)
    live = () if found is None else _list_live(found, observed)
    named = frozenset(found.node_ids) if found is not None and presence is Presence.OURS else frozenset()
    mine = found is None or presence is Presence.OURS
    nodes, leftovers = [], []
    for node in sorted(observed.listing.nodes.values(), key=_natural):
        owner = _owner(node.labels, observed, meta)
        ours = owner is Owner.OURS or (adopted and owner is Owner.RELIC)
        if mine and (node.queued_resource.rpartition("/")[2] == cloud_id or (ours and node.id in named)):
            nodes.append(node)
        elif ours and node not in live:
            leftovers.append(node)
    return Sight(
        presence=presence,
        resource=found,
        nodes=tuple(nodes),
        live=live,
        unlabelled=() if found is None else _list_unlabelled(found, live, observed, meta),
        leftovers=tuple(leftovers),
        strays=_list_others(observed, meta, cloud_id, Owner.OURS),
        relics=_list_others(observed, meta, cloud_id, Owner.RELIC),
    )


def _list_others(
    observed: Observed, meta: ObjectMeta, cloud_id: str, owner: Owner
) -> tuple[CloudQueuedResource, ...]:
    listed = () if observed.listing is None else observed.listing.resources.values()
    mine = [r for r in listed if r.id != cloud_id and _owner(_labels_of(r), observed, meta) is owner]
    return tuple(r for r in mine if _judge(r, observed, meta, adopted=False) is not Presence.FOREIGN)


def _judge(found: CloudQueuedResource, observed: Observed, meta: ObjectMeta, *, adopted: bool) -> Presence:
    """Judge by the request's labels, which nobody can change; where they name nobody who is there, by its nodes'."""
    owner = _owner(_labels_of(found), observed, meta)
    if owner in {Owner.OURS, Owner.FOREIGN}:
        return _PRESENCES[owner]
    on_nodes = {_owner(node.labels, observed, meta) for node in _list_live(found, observed)}
    if Owner.FOREIGN in on_nodes:
        return Presence.FOREIGN
    # No other cluster takes for unlabelled what names this one, or what has a node that does.
    certain = owner is Owner.RELIC or not on_nodes or Owner.OURS in on_nodes
    return Presence.OURS if adopted and certain else _PRESENCES[owner]


def _list_live(found: CloudQueuedResource, observed: Observed) -> tuple[CloudNode, ...]:
    listed = () if observed.listing is None else observed.listing.nodes.values()
    mine = [node for node in listed if _is_of(node, found)]
    return tuple(sorted(mine, key=_natural))


def _is_of(node: CloudNode, found: CloudQueuedResource) -> bool:
    if node.queued_resource:
        return node.queued_resource.rpartition("/")[2] == found.id
    return node.id in found.node_ids


def _list_unlabelled(
    found: CloudQueuedResource, live: tuple[CloudNode, ...], observed: Observed, meta: ObjectMeta
) -> tuple[CloudNode, ...]:
    if _owner(_labels_of(found), observed, meta) is Owner.OURS:
        return ()
    return tuple(node for node in live if _owner(node.labels, observed, meta) is not Owner.OURS)


def _owner(labels: Mapping[str, str], observed: Observed, meta: ObjectMeta) -> Owner:
    return find_owner(labels, meta, cluster_id=observed.cluster_id)


def _labels_of(resource: CloudQueuedResource) -> Mapping[str, Any]:
    labels: Mapping[str, Any] = resource.node.get("labels", {})
    return labels


def _natural(node: CloudNode) -> tuple[str, int, str]:
    """Sort prefix-2 before prefix-10."""
    prefix, _, index = node.id.rpartition("-")
    return (prefix, int(index), node.id) if index.isdecimal() else (node.id, -1, node.id)
