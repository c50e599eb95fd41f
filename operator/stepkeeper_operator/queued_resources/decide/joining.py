"""Judge whether all hosts of a resource have joined the cluster. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from stepkeeper_operator.api.v1alpha1.conditions import ConditionUpdate
from stepkeeper_operator.api.v1alpha1.queuedresource import QueuedResource
from stepkeeper_operator.api.v1alpha1.queuedresource_status import (
    QueuedResourceConditionType,
    QueuedResourceState,
    QueuedResourceStatus,
)
from stepkeeper_operator.cloud_tpu.cloud import CloudNode
from stepkeeper_operator.labels import CLOUD_NODE_LABEL, QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.decide.answers import book
from stepkeeper_operator.queued_resources.decide.mirror import match_members
from stepkeeper_operator.queued_resources.observed import Member
from stepkeeper_operator.queued_resources.sight import Presence, Scene, Sight

__all__ = ["derive_joined", "note_missing"]

_KIND: Final = QueuedResourceConditionType.NODES_JOINED
_NAMED: Final = 4
_MISSING: Final = {"Joining", "JoinTimeout", "HostsUnknown"}
"""Reasons of condition NodesJoined while hosts are missing."""


def derive_joined(
    resource: QueuedResource, status: QueuedResourceStatus, scene: Scene
) -> tuple[ConditionUpdate | None, float | None]:
    """Judge it, and also return in how many seconds the deadline is over."""
    sight, now = scene.sight, scene.now
    if sight.presence is Presence.UNKNOWN:
        return None, None
    if not _are_expected(status, sight):
        text = "its hosts join once it is active"
        return ConditionUpdate(type=_KIND, status=False, reason="NotActive", message=text), None
    gaps = _find_gaps(sight, match_members(sight.nodes, scene.observed.members))
    if not gaps:
        total = sum(node.n_hosts for node in sight.nodes)
        text = f"{total} of {total} hosts are Ready nodes"
        return ConditionUpdate(type=_KIND, status=True, reason="AllHostsJoined", message=text), None
    since = status.bookkeeping.missing_since or status.bookkeeping.active_since
    left_s = (now if since is None else since) + resource.spec.join_timeout_seconds - now
    return _judge_gaps(resource, gaps, left_s)


def note_missing(status: QueuedResourceStatus, scene: Scene) -> QueuedResourceStatus:
    """Note when hosts begin to be missing: from then on they have the time to join, however long all were here."""
    sight = scene.sight
    known = next((c.reason for c in status.conditions if c.type == _KIND), None)
    if sight.presence is Presence.UNKNOWN or known is None or known in _MISSING:
        return status
    if not _are_expected(status, sight):
        return status
    gaps = _find_gaps(sight, match_members(sight.nodes, scene.observed.members))
    return status if all(gap.cordoned for gap in gaps) else book(status, missing_since=int(scene.now))


def _are_expected(status: QueuedResourceStatus, sight: Sight) -> bool:
    nobody = not sight.nodes and (sight.resource is None or not sight.resource.node_ids)
    return status.state is QueuedResourceState.ACTIVE and not nobody and not status.bookkeeping.removing


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """A slice that isn't here as a whole."""

    text: str
    cordoned: bool = False
    """Its hosts are all here, but no pods may come to some of them."""

    uncounted: bool = False
    """The cloud doesn't say how many hosts it has."""


def _judge_gaps(
    resource: QueuedResource, gaps: list[_Gap], left_s: float
) -> tuple[ConditionUpdate, float | None]:
    more = f"; and {len(gaps) - _NAMED} more nodes" if len(gaps) > _NAMED else ""
    what = f"missing: {'; '.join(gap.text for gap in gaps[:_NAMED])}{more}"
    if all(gap.cordoned for gap in gaps):
        return ConditionUpdate(type=_KIND, status=False, reason="Cordoned", message=what), None
    if left_s > 0 and all(gap.uncounted for gap in gaps):
        return ConditionUpdate(type=_KIND, status=None, reason="HostsUnknown", message=what), left_s
    if left_s > 0:
        return ConditionUpdate(type=_KIND, status=False, reason="Joining", message=what), left_s
    text = (
        f"{what}. They had {resource.spec.join_timeout_seconds} s. Look at the startup script's output on such a host "
        "(gcloud compute tpus tpu-vm ssh, then journalctl -u google-startup-scripts, and -u kubelet or, on k3s, "
        "-u k3s-agent), at its join token, and at its labels: it needs "
        f"{QUEUED_RESOURCE_UID_LABEL}={resource.metadata.uid} and {CLOUD_NODE_LABEL}"
    )
    return ConditionUpdate(type=_KIND, status=False, reason="JoinTimeout", message=text), None


def _find_gaps(sight: Sight, matched: Mapping[str, tuple[Member, ...]]) -> list[_Gap]:
    gaps = [_describe_gap(node, matched.get(node.id, ())) for node in sight.nodes]
    listed = {node.id for node in sight.nodes}
    asked = () if sight.resource is None else sight.resource.node_ids
    unlisted = [_Gap(text=f"{name}: the cloud doesn't list it") for name in asked if name not in listed]
    return [gap for gap in (*gaps, *unlisted) if gap is not None]


def _describe_gap(node: CloudNode, members: tuple[Member, ...]) -> _Gap | None:
    """Describe which hosts of the node are missing; None: none is."""
    n_joined = sum(member.joined for member in members)
    if not node.n_hosts:
        text = f"{node.id}: the cloud doesn't say how many hosts it has; {n_joined} have joined"
        return _Gap(text=text, uncounted=True)
    if n_joined >= node.n_hosts:
        return None
    silent = [member.name for member in members if not member.ready]
    cordoned = [member.name for member in members if member.ready and member.cordoned]
    absent = "" if len(members) >= node.n_hosts else _describe_absent(node, members)
    texts = (
        f"{', '.join(silent[:_NAMED])} not Ready" if silent else "",
        f"{', '.join(cordoned[:_NAMED])} cordoned (kubectl uncordon {cordoned[0]})" if cordoned else "",
        absent,
    )
    text = f"{node.id}: {', '.join(text for text in texts if text)}"
    return _Gap(text=text, cordoned=bool(cordoned) and not silent and not absent)


def _describe_absent(node: CloudNode, members: tuple[Member, ...]) -> str:
    here = {address for member in members for address in member.addresses}
    addresses = [address for address in node.addresses if address and address not in here]
    if addresses and len(addresses) <= node.n_hosts - len(members):
        return f"hosts at {', '.join(addresses[:_NAMED])}"
    return f"{len(members)} of {node.n_hosts} hosts"
