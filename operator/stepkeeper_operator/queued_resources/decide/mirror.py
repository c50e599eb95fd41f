"""Mirror what the cloud has of a resource in its status. Pure."""

from collections import Counter
from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    MAX_NODES,
    CloudNodeStatus,
    MaintenanceStatus,
    QueuedResourceState,
    QueuedResourceStatus,
    StateInitiator,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudMaintenance, CloudNode
from stepkeeper_operator.queued_resources.observed import Member
from stepkeeper_operator.queued_resources.sight import Presence, Scene

__all__ = ["find_next_maintenance", "match_members", "mirror_cloud", "to_state", "to_word"]

_STATES: Final = {
    "CREATING": QueuedResourceState.CREATING,
    "ACCEPTED": QueuedResourceState.ACCEPTED,
    "WAITING_FOR_RESOURCES": QueuedResourceState.WAITING,
    "PROVISIONING": QueuedResourceState.PROVISIONING,
    "ACTIVE": QueuedResourceState.ACTIVE,
    "SUSPENDING": QueuedResourceState.SUSPENDING,
    "SUSPENDED": QueuedResourceState.SUSPENDED,
    "FAILED": QueuedResourceState.FAILED,
    "DELETING": QueuedResourceState.DELETING,
}
_INITIATORS: Final = {"USER": StateInitiator.USER, "SERVICE": StateInitiator.SERVICE}
_ONGOING: Final = "ONGOING"
_TEXT_LIMIT: Final = 512
_SYMPTOM_LIMIT: Final = 256
_MOST_SYMPTOMS: Final = 8


def to_state(state: str) -> QueuedResourceState:
    """Return the state for the cloud's name of it."""
    return _STATES.get(state, QueuedResourceState.UNKNOWN)


def to_word(name: str) -> str:
    """Write a name of the cloud's as Kubernetes writes such words: UNHEALTHY_MAINTENANCE, UnhealthyMaintenance.

    UNKNOWN(77) stays as it is.
    """
    return name if "(" in name else "".join(part.capitalize() for part in name.split("_"))


def mirror_cloud(status: QueuedResourceStatus, scene: Scene) -> QueuedResourceStatus:
    """Return the status with what the cloud has. While nobody can tell, it stays as it was."""
    observed, sight = scene.observed, scene.sight
    if sight.presence is Presence.UNKNOWN:
        return status
    if not sight.is_ours or sight.resource is None:
        return _clear_mirror(status)
    joined = match_members(sight.nodes, observed.members)
    rows = [(_show_node(node, joined.get(node.id, ())), node) for node in sight.nodes]
    if len(rows) > MAX_NODES:
        rows.sort(key=lambda row: _is_well(row[0]))
    n_missing = len(set(sight.resource.node_ids) - {node.id for node in sight.nodes})
    return status.model_copy(
        update={
            "state": to_state(sight.resource.state),
            "state_initiator": _INITIATORS.get(sight.resource.initiator),
            "cloud_name": sight.resource.name,
            "joined": _show_joined([row for row, _ in rows], n_missing),
            "autocheckpoint": _sum_up_autocheckpoint(sight.nodes),
            "next_maintenance_time": _find_next_start(sight.nodes, now=scene.now),
            "node_count": len(rows),
            "nodes": tuple(row for row, _ in rows[:MAX_NODES]),
        }
    )


def _clear_mirror(status: QueuedResourceStatus) -> QueuedResourceStatus:
    """Return the status without nodes: the cloud has none."""
    return status.model_copy(
        update={
            "state_initiator": None,
            "joined": "",
            "autocheckpoint": "",
            "next_maintenance_time": None,
            "node_count": 0,
            "nodes": (),
        }
    )


def match_members(nodes: tuple[CloudNode, ...], members: tuple[Member, ...]) -> dict[str, tuple[Member, ...]]:
    """Match the cluster's nodes with the cloud's, by id, cloud node's id first.

    A member belongs to the cloud node that its label names, or that has its address. One that names a cloud node of
    somebody else is nobody's: anybody whose kubelet may join could write our uid on a label.
    """
    by_address = {address: node.id for node in nodes for address in node.addresses if address}
    ids = {node.id for node in nodes}
    matched: dict[str, tuple[Member, ...]] = {}
    for member in members:
        node_id: str | None = member.cloud_node
        if not member.cloud_node:
            node_id = next((by_address[a] for a in member.addresses if a in by_address), None)
        if node_id in ids and node_id is not None:
            matched[node_id] = (*matched.get(node_id, ()), member)
    return matched


def find_next_maintenance(
    nodes: tuple[CloudNode, ...], *, now: float
) -> tuple[CloudNode, CloudMaintenance] | None:
    """Find the node whose announced maintenance begins next. What has begun comes last: it is too late for that."""
    announced = [(node, node.maintenance) for node in nodes if node.maintenance is not None]
    return min(announced, key=lambda pair: _rank_maintenance(pair[1], now=now)) if announced else None


def _rank_maintenance(maintenance: CloudMaintenance, *, now: float) -> tuple[int, int]:
    start = maintenance.window_start
    if maintenance.status == _ONGOING or (start is not None and start <= now):
        return 2, -(start or 0)
    return (1, 0) if start is None else (0, start)


def _find_next_start(nodes: tuple[CloudNode, ...], *, now: float) -> int | None:
    timed = [n for n in nodes if n.maintenance is not None and n.maintenance.window_start is not None]
    found = find_next_maintenance(tuple(timed), now=now)
    return None if found is None else found[1].window_start


def _is_well(node: CloudNodeStatus) -> bool:
    """Check whether there is nothing to say about the node."""
    healthy = node.health in {"", "Healthy"}
    joined = 0 < node.hosts <= node.joined_hosts
    return node.state == "Ready" and healthy and joined and node.upcoming_maintenance is None


def _show_node(node: CloudNode, members: tuple[Member, ...]) -> CloudNodeStatus:
    n_joined = sum(member.joined for member in members)
    return CloudNodeStatus(
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
        latest_window_start=maintenance.latest_window_start,
        can_reschedule=maintenance.can_reschedule,
    )


def _show_joined(rows: list[CloudNodeStatus], n_missing: int) -> str:
    """Show how many hosts have joined, of how many. A slice that isn't listed has an unknown number of them."""
    if not rows:
        return ""
    known = not n_missing and all(row.hosts for row in rows)
    total = str(sum(row.hosts for row in rows)) if known else "?"
    return f"{sum(row.joined_hosts for row in rows)}/{total}"


def _sum_up_autocheckpoint(nodes: tuple[CloudNode, ...]) -> str:
    counts = Counter(node.autocheckpoint_enabled for node in nodes)
    if not counts or counts[None]:
        return ""
    if counts[True] and counts[False]:
        return "Mixed"
    return "On" if counts[True] else "Off"
