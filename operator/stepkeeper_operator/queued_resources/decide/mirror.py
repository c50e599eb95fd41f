"""Mirror the cloud resource and its slices in the status. Pure."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource import TierSpec
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    MAX_SLICES,
    MaintenanceStatus,
    QueuedResourceStatus,
    SliceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudMaintenance, CloudNode, to_camel_case
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.queued_resources.cloud_view import View
from stepkeeper_operator.queued_resources.decide.answers import update_status

__all__ = ["find_next_maintenance", "is_lost", "match_members", "mirror_cloud"]

_TEXT_LIMIT: Final = 512
_SYMPTOM_LIMIT: Final = 256
_MAX_SYMPTOMS: Final = 8


def is_lost(node: CloudNode, tier: TierSpec) -> bool:
    """Return True if the node can't recover.

    The cloud doesn't always report a preempted node as preempted. On preemptible machines, stopped means the same,
    because the operator never stops a node. Guaranteed nodes are stopped by users, who can start them again.
    """
    return node.is_lost or (tier.guaranteed is None and node.is_stopped)


def mirror_cloud(status: QueuedResourceStatus, view: View) -> QueuedResourceStatus:
    """Return the status with the state of the cloud. Without a listing it is unchanged."""
    observed, cloud = view.observed, view.cloud
    if not cloud.known:
        return status
    if cloud.resource is None:
        gone = {"joined": "", "autocheckpoint": "", "next_maintenance_time": None}
        return update_status(status, slice_count=0, slices=(), **gone)
    joined = match_members(cloud.nodes, observed.members)
    rows = [_show_slice(node, joined[node.id]) for node in cloud.nodes]
    if len(rows) > MAX_SLICES:
        rows.sort(key=_needs_no_attention)
    upcoming = find_next_maintenance(cloud.nodes, now=view.now)
    n_missing = len(set(cloud.resource.node_ids) - {node.id for node in cloud.nodes})
    return update_status(
        status,
        state=cloud.resource.phase,
        cloud_name=cloud.resource.name,
        joined=_show_joined(rows, n_missing),
        autocheckpoint=_sum_up_autocheckpoint(cloud.nodes),
        next_maintenance_time=upcoming and upcoming[1].window_start,
        slice_count=len(rows),
        slices=tuple(rows[:MAX_SLICES]),
    )


def match_members(nodes: tuple[CloudNode, ...], members: tuple[Node, ...]) -> dict[str, tuple[Node, ...]]:
    """Match the cluster's nodes with the cloud's. Return them by the cloud node's id.

    A member belongs to the cloud node that its label names, or else to the one with its address. A member that names
    another object's cloud node belongs to none: any kubelet that may join can set our uid as a label.
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
    """Find the next maintenance: the earliest future one, else one without a time, else one that has begun."""
    announced = [(node, node.maintenance) for node in nodes if node.maintenance is not None]
    return min(announced, key=lambda pair: _rank_maintenance(pair[1], now=now)) if announced else None


def _rank_maintenance(maintenance: CloudMaintenance, *, now: float) -> tuple[int, int]:
    start = maintenance.window_start
    if maintenance.is_ongoing or (start is not None and start <= now):
        return 2, -(start or 0)
    return (1, 0) if start is None else (0, start)


def _needs_no_attention(node: SliceStatus) -> bool:
    healthy = node.health in {"", "Healthy"}
    joined = 0 < node.hosts <= node.joined_hosts
    return node.state == "Ready" and healthy and joined and node.upcoming_maintenance is None


def _show_slice(node: CloudNode, members: tuple[Node, ...]) -> SliceStatus:
    n_joined = sum(member.schedulable for member in members)
    return SliceStatus(
        name=node.id,
        state=to_camel_case(node.state)[:32],
        health=to_camel_case(node.health)[:64],
        health_description=node.health_description[:_TEXT_LIMIT],
        symptoms=tuple(text[:_SYMPTOM_LIMIT] for text in node.symptoms[:_MAX_SYMPTOMS]),
        hosts=node.n_hosts,
        joined_hosts=min(node.n_hosts, n_joined) if node.n_hosts else n_joined,
        autocheckpoint_enabled=node.autocheckpoint_enabled,
        upcoming_maintenance=None if node.maintenance is None else _show_maintenance(node.maintenance),
    )


def _show_maintenance(maintenance: CloudMaintenance) -> MaintenanceStatus:
    return MaintenanceStatus(
        status=to_camel_case(maintenance.status)[:32],
        type=to_camel_case(maintenance.type)[:64],
        window_start=maintenance.window_start,
        window_end=maintenance.window_end,
    )


def _show_joined(rows: list[SliceStatus], n_missing: int) -> str:
    """Render the hosts that have joined and their total, which is unknown if a slice isn't listed."""
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
