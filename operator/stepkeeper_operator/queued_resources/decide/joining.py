"""Judge whether all hosts of a resource have joined the cluster. Pure."""

from typing import Final

from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudNode
from stepkeeper_operator.labels import CLOUD_NODE_LABEL, QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.decide.mirror import count_hosts, match_members
from stepkeeper_operator.queued_resources.decision import Finding
from stepkeeper_operator.queued_resources.observed import Member
from stepkeeper_operator.queued_resources.sight import Presence, Scene

__all__ = ["derive_joined"]

_KIND: Final = QueuedResourceConditionType.NODES_JOINED
_NAMED: Final = 4


def derive_joined(
    resource: QueuedResource, status: QueuedResourceStatus, scene: Scene
) -> tuple[Finding | None, float | None]:
    """Judge it, and also return in how many seconds the deadline is over."""
    sight, now = scene.sight, scene.now
    if sight.presence is Presence.UNKNOWN:
        return None, None
    if status.state is not QueuedResourceState.ACTIVE or not sight.nodes or status.bookkeeping.removing:
        text = "its hosts join once it is active"
        return Finding(type=_KIND, status=False, reason="NotActive", message=text), None
    matched = match_members(sight.nodes, scene.observed.members)
    missing = [text for node in sight.nodes if (text := _describe_missing(node, matched.get(node.id, ())))]
    total = sum(count_hosts(node) for node in sight.nodes)
    if not missing:
        text = f"{total} of {total} hosts are Ready nodes"
        return Finding(type=_KIND, status=True, reason="AllHostsJoined", message=text), None
    since = status.bookkeeping.active_since
    left_s = (now if since is None else since) + resource.spec.join_timeout_seconds - now
    more = f"; and {len(missing) - _NAMED} more nodes" if len(missing) > _NAMED else ""
    what = f"missing: {'; '.join(missing[:_NAMED])}{more}"
    if left_s > 0:
        return Finding(type=_KIND, status=False, reason="Joining", message=what), left_s
    text = (
        f"{what}. They had {resource.spec.join_timeout_seconds} s. Look at the startup script's output on such a host "
        "(gcloud compute tpus tpu-vm ssh, then journalctl -u google-startup-scripts and -u kubelet), at its join token,"
        f" and at its labels: it needs {QUEUED_RESOURCE_UID_LABEL}={resource.metadata.uid} and {CLOUD_NODE_LABEL}"
    )
    return Finding(type=_KIND, status=False, reason="JoinTimeout", message=text), None


def _describe_missing(node: CloudNode, members: tuple[Member, ...]) -> str:
    """Describe which hosts of the node are missing; empty: none is."""
    ready = [member for member in members if member.ready]
    if len(ready) >= count_hosts(node):
        return ""
    silent = [member.name for member in members if not member.ready]
    if silent:
        return f"{node.id}: {', '.join(silent[:_NAMED])} not Ready"
    here = {address for member in members for address in member.addresses}
    addresses = [address for address in node.addresses if address and address not in here]
    if addresses and len(addresses) < count_hosts(node) + 1:
        return f"{node.id}: hosts at {', '.join(addresses[:_NAMED])}"
    return f"{node.id}: {len(ready)} of {count_hosts(node)} hosts"
