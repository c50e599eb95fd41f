"""Derive condition NodesJoined: whether all hosts of a resource have joined the cluster. Pure."""

from functools import partial
from typing import Final, NamedTuple, TypeAlias

from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.cloud_tpu.cloud import CloudNode
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.labels import QUEUED_RESOURCE_UID_LABEL, SLICE_LABEL
from stepkeeper_operator.queued_resources.cloud_view import View
from stepkeeper_operator.queued_resources.decide.answers import update_status
from stepkeeper_operator.queued_resources.decide.mirror import match_members

__all__ = ["judge_joining"]

_judge: Final = partial(ConditionUpdate, QueuedResourceConditionType.NODES_JOINED, status=False)
_MAX_NAMED: Final = 4

Judgement: TypeAlias = tuple[QueuedResourceStatus, ConditionUpdate | None, float | None]
"""The status with missingHostsSince, the condition, and the seconds until the join timeout."""


class _Gap(NamedTuple):
    """A slice with missing hosts."""

    reason: Reason
    text: str


def judge_joining(resource: QueuedResource, status: QueuedResourceStatus, view: View) -> Judgement:
    """Derive the condition. The join timeout starts whenever hosts begin to be missing."""
    cloud = view.cloud
    if not cloud.known:
        return status, None, None
    active = status.state is QueuedResourceState.ACTIVE and not status.removing
    requested = () if cloud.resource is None else cloud.resource.node_ids
    if not active or not (cloud.nodes or requested):
        judged = _judge(Reason.NOT_ACTIVE, "its hosts join once it is active")
        return update_status(status, missing_hosts_since=None), judged, None
    gaps = _find_gaps(view)
    if gaps:
        return _judge_gaps(resource, status, gaps, now=view.now)
    total = sum(node.n_hosts for node in cloud.nodes)
    judged = _judge(Reason.ALL_HOSTS_JOINED, f"{total} of {total} hosts are Ready nodes", status=True)
    return update_status(status, missing_hosts_since=None), judged, None


def _judge_gaps(
    resource: QueuedResource, status: QueuedResourceStatus, gaps: list[_Gap], *, now: float
) -> Judgement:
    more = f"; and {len(gaps) - _MAX_NAMED} more slices" if len(gaps) > _MAX_NAMED else ""
    text = f"missing: {'; '.join(gap.text for gap in gaps[:_MAX_NAMED])}{more}"
    reasons = {gap.reason for gap in gaps}
    if reasons == {Reason.CORDONED}:
        return update_status(status, missing_hosts_since=None), _judge(Reason.CORDONED, text), None
    since = status.missing_hosts_since or int(now)
    status = update_status(status, missing_hosts_since=since)
    left_s = since + resource.spec.join_timeout_seconds - now
    if left_s <= 0:
        return status, _judge(Reason.JOIN_TIMEOUT, _describe_timeout(resource, text)), None
    if reasons == {Reason.HOSTS_UNKNOWN}:
        return status, _judge(Reason.HOSTS_UNKNOWN, text, status=None), left_s
    return status, _judge(Reason.JOINING, text), left_s


def _describe_timeout(resource: QueuedResource, missing: str) -> str:
    return (
        f"{missing}. The join timeout of {resource.spec.join_timeout_seconds} s has passed. Check the output of the "
        "startup script on a host (gcloud compute tpus tpu-vm ssh, then journalctl -u google-startup-scripts, and -u "
        "kubelet or, on k3s, -u k3s-agent), its join token, and its labels: the Node needs "
        f"{QUEUED_RESOURCE_UID_LABEL}={resource.metadata.uid} and {SLICE_LABEL}"
    )


def _find_gaps(view: View) -> list[_Gap]:
    nodes = view.cloud.nodes
    matched = match_members(nodes, view.observed.members)
    gaps = [_find_gap(node, matched[node.id]) for node in nodes]
    requested = () if view.cloud.resource is None else view.cloud.resource.node_ids
    unlisted = [name for name in requested if name not in matched]
    gaps += [_Gap(Reason.JOINING, f"{name}: not listed by the cloud") for name in unlisted]
    return [gap for gap in gaps if gap is not None]


def _find_gap(node: CloudNode, members: tuple[Node, ...]) -> _Gap | None:
    """Describe the missing hosts of the node; None: none is missing."""
    n_joined = sum(member.schedulable for member in members)
    if not node.n_hosts:
        text = f"{node.id}: the cloud doesn't report its number of hosts; {n_joined} have joined"
        return _Gap(Reason.HOSTS_UNKNOWN, text)
    if n_joined >= node.n_hosts:
        return None
    silent = [member.name for member in members if not member.ready]
    cordoned = [member.name for member in members if member.ready and member.unschedulable]
    absent = "" if len(members) >= node.n_hosts else _describe_absent(node, members)
    texts = (
        f"{', '.join(silent[:_MAX_NAMED])} not Ready" if silent else "",
        f"{', '.join(cordoned[:_MAX_NAMED])} cordoned (kubectl uncordon {cordoned[0]})" if cordoned else "",
        absent,
    )
    reason = Reason.JOINING if silent or absent else Reason.CORDONED
    return _Gap(reason, f"{node.id}: {', '.join(text for text in texts if text)}")


def _describe_absent(node: CloudNode, members: tuple[Node, ...]) -> str:
    here = {address for member in members for address in member.addresses}
    addresses = [address for address in node.addresses if address and address not in here]
    if addresses and len(addresses) <= node.n_hosts - len(members):
        return f"hosts at {', '.join(addresses[:_MAX_NAMED])}"
    return f"{len(members)} of {node.n_hosts} hosts"
