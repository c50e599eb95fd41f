"""Mirror what the cloud has of a resource in its status. Pure."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource import TierSpec
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    MAX_SLICES,
    MaintenanceStatus,
    QueuedResourceState,
    QueuedResourceStatus,
    SliceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudMaintenance, CloudNode
from stepkeeper_operator.facts import Node
from stepkeeper_operator.queued_resources.sight import Scene

__all__ = [
    "find_lost_states",
    "find_next_maintenance",
    "match_members",
    "mirror_cloud",
    "to_state",
    "to_word",
]

_NO_CLOUD_STATES: Final = {QueuedResourceState.PENDING, QueuedResourceState.GONE}
_LOST_STATES: Final = frozenset({"PREEMPTED", "TERMINATED"})
_ONGOING: Final = "ONGOING"
_TEXT_LIMIT: Final = 512
_SYMPTOM_LIMIT: Final = 256
_MOST_SYMPTOMS: Final = 8


def to_state(state: str) -> QueuedResourceState:
    """Return the state for the cloud's name of it."""
    states = {each.value: each for each in QueuedResourceState if each not in _NO_CLOUD_STATES}
    return states.get(to_word(state), QueuedResourceState.UNKNOWN)


def to_word(name: str) -> str:
    """Write a name of the cloud's as Kubernetes writes such words: UNHEALTHY_MAINTENANCE, UnhealthyMaintenance.

    UNKNOWN(77) stays as it is.
    """
    return name if "(" in name else "".join(part.capitalize() for part in name.split("_"))


def find_lost_states(tier: TierSpec) -> frozenset[str]:
    """Find the states from which a node doesn't come back.

    The cloud doesn't always call a node PREEMPTED that it took away: STOPPED means the same on machines that it may
    take at any time, since the operator stops none. Guaranteed ones are stopped by people, who start them again.
    """
    return _LOST_STATES if tier.guaranteed is not None else _LOST_STATES | {"STOPPED"}


def mirror_cloud(status: QueuedResourceStatus, scene: Scene) -> QueuedResourceStatus:
    """Return the status with what the cloud has. Without a listing it stays as it was."""
    observed, sight = scene.observed, scene.sight
    if not sight.known:
        return status
    if sight.resource is None:
        gone = {"next_maintenance_time": None, "slice_count": 0, "slices": ()}
        return status.model_copy(update={"joined": "", "autocheckpoint": "", **gone})
    joined = match_members(sight.nodes, observed.members)
    rows = [_show_slice(node, joined[node.id]) for node in sight.nodes]
    if len(rows) > MAX_SLICES:
        rows.sort(key=_is_well)
    upcoming = find_next_maintenance(sight.nodes, now=scene.now)
    n_missing = len(set(sight.resource.node_ids) - {node.id for node in sight.nodes})
    return status.model_copy(
        update={
            "state": to_state(sight.resource.state),
            "cloud_name": sight.resource.name,
            "joined": _show_joined(rows, n_missing),
            "autocheckpoint": _sum_up_autocheckpoint(sight.nodes),
            "next_maintenance_time": upcoming and upcoming[1].window_start,
            "slice_count": len(rows),
            "slices": tuple(rows[:MAX_SLICES]),
        }
    )


def match_members(nodes: tuple[CloudNode, ...], members: tuple[Node, ...]) -> dict[str, tuple[Node, ...]]:
    """Match the cluster's nodes with the cloud's, by id, cloud node's id first.

    A member belongs to the cloud node that its label names, or that has its address. One that names a cloud node of
    somebody else belongs to none: whatever kubelet may join could write our uid on a label.
    """
    by_address = {address: node.id for node in nodes for address in node.addresses if address}
    matched: dict[str, tuple[Node, ...]] = {node.id: () for node in nodes}
    for member in members:
        by_its_address = (by_address[each] for each in member.addresses if each in by_address)
        node_id = member.slice_id or next(by_its_address, "")
        if node_id in matched:
            matched[node_id] = (*matched[node_id], member)
    return matched


def find_next_maintenance(
    nodes: tuple[CloudNode, ...], *, now: float
) -> tuple[CloudNode, CloudMaintenance] | None:
    """Find the node whose announced maintenance begins next; of a known time, else of none, else one that has begun."""
    announced = [(node, node.maintenance) for node in nodes if node.maintenance is not None]
    return min(announced, key=lambda pair: _rank_maintenance(pair[1], now=now)) if announced else None


def _rank_maintenance(maintenance: CloudMaintenance, *, now: float) -> tuple[int, int]:
    start = maintenance.window_start
    if maintenance.status == _ONGOING or (start is not None and start <= now):
        return 2, -(start or 0)
    return (1, 0) if start is None else (0, start)


def _is_well(node: SliceStatus) -> bool:
    """Return True if the node needs no attention."""
    healthy = node.health in {"", "Healthy"}
    joined = 0 < node.hosts <= node.joined_hosts
    return node.state == "Ready" and healthy and joined and node.upcoming_maintenance is None


def _show_slice(node: CloudNode, members: tuple[Node, ...]) -> SliceStatus:
    n_joined = sum(member.takes_pods for member in members)
    return SliceStatus(
        name=node.id,
        state=to_word(node.state)[:32],
        health=to_word(node.health)[:64],
        health_description=node.health_description[:_TEXT_LIMIT],
        symptoms=tuple(text[:_SYMPTOM_LIMIT] for text in node.symptoms[:_MOST_SYMPTOMS]),
        hosts=node.n_hosts,
        joined_hosts=min(node.n_hosts, n_joined) if node.n_hosts else n_joined,
        autocheckpoint_enabled=node.autocheckpoint_enabled,
        upcoming_maintenance=None if node.maintenance is None else _show_maintenance(node.maintenance),
    )


def _show_maintenance(maintenance: CloudMaintenance) -> MaintenanceStatus:
    return MaintenanceStatus(
        status=to_word(maintenance.status)[:32],
        type=to_word(maintenance.type)[:64],
        window_start=maintenance.window_start,
        window_end=maintenance.window_end,
    )


def _show_joined(rows: list[SliceStatus], n_missing: int) -> str:
    """Show how many hosts have joined, of how many. A slice that isn't listed has an unknown number of them."""
    if not rows:
        return ""
    known = not n_missing and all(row.hosts for row in rows)
    total = str(sum(row.hosts for row in rows)) if known else "?"
    return f"{sum(row.joined_hosts for row in rows)}/{total}"


def _sum_up_autocheckpoint(nodes: tuple[CloudNode, ...]) -> str:
    settings = {node.autocheckpoint_enabled for node in nodes}
    if not settings or None in settings:
        return ""
    return "Mixed" if len(settings) > 1 else "On" if True in settings else "Off"
