"""Keep what v2alpha1 has told of nodes while only v2 answers, which tells neither maintenance nor autocheckpoint. Pure.

A window that isn't told any more isn't over, and autocheckpoint can't change on a live node.
"""

import re
from dataclasses import replace

from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    CloudNodeStatus,
    MaintenanceStatus,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudMaintenance, CloudNode
from stepkeeper_operator.queued_resources.observed import Observed

__all__ = ["recall"]


def recall(observed: Observed, status: QueuedResourceStatus, *, now: float) -> Observed:
    """Return the observation with what the status knows of nodes, where the version of the listing doesn't tell."""
    listing = observed.listing
    if listing is None or listing.version is not ApiVersion.V2:
        return observed
    known = {row.name: row for row in status.nodes}
    nodes = {
        node_id: _complete(node, known[node_id], now) if node_id in known else node
        for node_id, node in listing.nodes.items()
    }
    return replace(observed, listing=replace(listing, nodes=nodes))


def _complete(node: CloudNode, known: CloudNodeStatus, now: float) -> CloudNode:
    window = known.upcoming_maintenance
    return replace(
        node,
        autocheckpoint_enabled=known.autocheckpoint_enabled,
        maintenance=None if window is None or _is_past(window, now) else _read(window),
    )


def _is_past(window: MaintenanceStatus, now: float) -> bool:
    last = window.window_start if window.window_end is None else window.window_end
    return last is not None and last <= now


def _read(window: MaintenanceStatus) -> CloudMaintenance:
    return CloudMaintenance(
        type=_to_name(window.type),
        status=_to_name(window.status),
        window_start=window.window_start,
        window_end=window.window_end,
        latest_window_start=window.latest_window_start,
        can_reschedule=window.can_reschedule,
    )


def _to_name(word: str) -> str:
    """Write a word of the status as the cloud does: UnhealthyMaintenance, UNHEALTHY_MAINTENANCE."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", word).upper()
