"""Judge whether all hosts of a resource have joined the cluster. Pure."""

from typing import Final, NamedTuple, TypeAlias

from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate, find_condition
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudNode
from stepkeeper_operator.facts import Node
from stepkeeper_operator.labels import CLOUD_NODE_LABEL, QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.decide.answers import book
from stepkeeper_operator.queued_resources.decide.mirror import match_members
from stepkeeper_operator.queued_resources.sight import Scene

__all__ = ["judge_joining"]

_KIND: Final = QueuedResourceConditionType.NODES_JOINED
_NAMED: Final = 4
_CORDONED: Final = "Cordoned"
_JOINING: Final = "Joining"
_TIMEOUT: Final = "JoinTimeout"
_UNCOUNTED: Final = "HostsUnknown"
_MISSING: Final = {_JOINING, _TIMEOUT, _UNCOUNTED}
"""Reasons of the condition while hosts are missing."""

Judgement: TypeAlias = tuple[QueuedResourceStatus, ConditionUpdate | None, float | None]
"""The status with the time at which hosts began to be missing, the condition, the seconds until their time is over."""


class _Gap(NamedTuple):
    """A slice that isn't here as a whole."""

    reason: str
    text: str


def judge_joining(resource: QueuedResource, status: QueuedResourceStatus, scene: Scene) -> Judgement:
    """Judge it. From when hosts begin to be missing they have the time to join, however long all were here."""
    sight = scene.sight
    if not sight.known:
        return status, None, None
    active = status.state is QueuedResourceState.ACTIVE and not status.bookkeeping.removing
    if not active or not (sight.nodes or (sight.resource and sight.resource.node_ids)):
        return status, _judge(False, "NotActive", "its hosts join once it is active"), None
    gaps = _find_gaps(scene)
    if gaps:
        return _judge_gaps(resource, status, gaps, now=scene.now)
    total = sum(node.n_hosts for node in sight.nodes)
    return status, _judge(True, "AllHostsJoined", f"{total} of {total} hosts are Ready nodes"), None


def _judge_gaps(
    resource: QueuedResource, status: QueuedResourceStatus, gaps: list[_Gap], *, now: float
) -> Judgement:
    more = f"; and {len(gaps) - _NAMED} more nodes" if len(gaps) > _NAMED else ""
    text = f"missing: {'; '.join(gap.text for gap in gaps[:_NAMED])}{more}"
    reasons, known = {gap.reason for gap in gaps}, find_condition(status.conditions, _KIND)
    if reasons == {_CORDONED}:
        return status, _judge(False, _CORDONED, text), None
    if known is not None and known.reason not in _MISSING:
        status = book(status, missing_since=int(now))
    since = status.bookkeeping.missing_since or status.bookkeeping.active_since or now
    left_s = since + resource.spec.join_timeout_seconds - now
    if left_s <= 0:
        return status, _judge(False, _TIMEOUT, _describe_timeout(resource, text)), None
    if reasons == {_UNCOUNTED}:
        return status, _judge(None, _UNCOUNTED, text), left_s
    return status, _judge(False, _JOINING, text), left_s


def _judge(value: bool | None, reason: str, message: str) -> ConditionUpdate:
    return ConditionUpdate(type=_KIND, status=value, reason=reason, message=message)


def _describe_timeout(resource: QueuedResource, missing: str) -> str:
    return (
        f"{missing}. They had {resource.spec.join_timeout_seconds} s. Look at the output of the startup script on a "
        "host (gcloud compute tpus tpu-vm ssh, then journalctl -u google-startup-scripts, and -u kubelet or, on k3s, "
        "-u k3s-agent), at its join token, and at its labels: it needs "
        f"{QUEUED_RESOURCE_UID_LABEL}={resource.metadata.uid} and {CLOUD_NODE_LABEL}"
    )


def _find_gaps(scene: Scene) -> list[_Gap]:
    nodes = scene.sight.nodes
    matched = match_members(nodes, scene.observed.members)
    gaps = [_find_gap(node, matched[node.id]) for node in nodes]
    listed = {node.id for node in nodes}
    asked = () if scene.sight.resource is None else scene.sight.resource.node_ids
    unlisted = [_Gap(_JOINING, f"{name}: the cloud doesn't list it") for name in asked if name not in listed]
    return [gap for gap in gaps if gap is not None] + unlisted


def _find_gap(node: CloudNode, members: tuple[Node, ...]) -> _Gap | None:
    """Describe which hosts of the node are missing; None: none is."""
    n_joined = sum(member.takes_pods for member in members)
    if not node.n_hosts:
        text = f"{node.id}: the cloud doesn't say how many hosts it has; {n_joined} have joined"
        return _Gap(_UNCOUNTED, text)
    if n_joined >= node.n_hosts:
        return None
    silent = [member.name for member in members if not member.ready]
    cordoned = [member.name for member in members if member.ready and member.unschedulable]
    absent = "" if len(members) >= node.n_hosts else _describe_absent(node, members)
    texts = (
        f"{', '.join(silent[:_NAMED])} not Ready" if silent else "",
        f"{', '.join(cordoned[:_NAMED])} cordoned (kubectl uncordon {cordoned[0]})" if cordoned else "",
        absent,
    )
    reason = _JOINING if silent or absent else _CORDONED
    return _Gap(reason, f"{node.id}: {', '.join(text for text in texts if text)}")


def _describe_absent(node: CloudNode, members: tuple[Node, ...]) -> str:
    here = {address for member in members for address in member.addresses}
    addresses = [address for address in node.addresses if address and address not in here]
    if addresses and len(addresses) <= node.n_hosts - len(members):
        return f"hosts at {', '.join(addresses[:_NAMED])}"
    return f"{len(members)} of {node.n_hosts} hosts"
