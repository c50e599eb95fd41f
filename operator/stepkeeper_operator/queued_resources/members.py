"""Read the nodes of this cluster that are hosts of a QueuedResource, and the pods on them. Pure."""

from typing import Final

from stepkeeper_operator.facts import Node
from stepkeeper_operator.facts.raw import RawObject, controller_of
from stepkeeper_operator.queued_resources.memory import ResourceMemory
from stepkeeper_operator.queued_resources.observed import Member, MemberPod

__all__ = ["holds_up", "read_member", "read_pod"]

_MIRROR: Final = "kubernetes.io/config.mirror"
"""Annotation on a pod that a kubelet runs from a file: nobody can evict it."""


def read_member(node: Node, uid: str, memory: ResourceMemory | None = None) -> Member:
    """Read a node as a host of the object with that uid. What was refused before is in its memory."""
    return Member(
        name=node.name,
        uid=node.uid,
        cloud_node=node.cloud_node,
        addresses=node.addresses,
        ready=node.ready,
        cordoned=node.unschedulable,
        cordoned_by_us=node.unschedulable and node.cordoned_by == uid,
        cordon_refusal=None if memory is None or node.unschedulable else memory.refused_cordons.get(node.uid),
        deletion_refusal=None if memory is None else memory.refused_deletions.get(node.uid),
    )


def holds_up(pod: RawObject) -> bool:
    """Return True for a pod that has to end before its machine goes."""
    owner = controller_of(pod)
    daemon = owner is not None and owner.get("kind") == "DaemonSet"
    mirror = _MIRROR in (pod["metadata"].get("annotations") or {})
    over = (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
    return not (daemon or mirror or over)


def read_pod(raw: RawObject) -> MemberPod:
    """Read a pod of a host."""
    meta = raw["metadata"]
    return MemberPod(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        node=raw["spec"]["nodeName"],
        stopping="deletionTimestamp" in meta,
    )
