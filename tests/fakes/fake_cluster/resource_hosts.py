"""Let the hosts of cloud nodes join a cluster in memory, and leave it."""

from collections.abc import Iterable
from typing import Any

from fake_cluster.cluster import FakeCluster

from stepkeeper_operator.cloud_tpu.cloud import CloudNode
from stepkeeper_operator.facts.raw import RawObject, parse_time, render_time
from stepkeeper_operator.labels import CLOUD_NODE_LABEL, QUEUED_RESOURCE_UID_LABEL
from stepkeeper_operator.queued_resources.naming import UID_LABEL

__all__ = ["sync_hosts"]


def sync_hosts(cluster: FakeCluster, nodes: Iterable[CloudNode], *, uid: str, now: float) -> None:
    """Let the hosts of ready cloud nodes join, silence the others, and end the pods that are told to.

    Args:
        cluster: The cluster that they join.
        nodes: All nodes of the cloud.
        uid: Uid of the QueuedResource whose the nodes without labels are.
        now: The time.

    """
    alive = set()
    for node in nodes:
        for index, address in enumerate(node.addresses):
            if node.state == "READY":
                alive.add(f"{node.id}-w{index}")
                labels = {
                    QUEUED_RESOURCE_UID_LABEL: node.labels.get(UID_LABEL, uid),
                    CLOUD_NODE_LABEL: node.id,
                }
                _join(cluster, f"{node.id}-w{index}", labels, address, now)
    for raw in cluster.list_objects("nodes"):
        if raw["metadata"]["name"] not in alive and _is_ready(raw):
            cluster.put("nodes", {**raw, "status": _status("Unknown", raw, now)})
    for pod in cluster.list_objects("pods"):
        deadline = parse_time(pod["metadata"].get("deletionTimestamp"))
        if deadline is not None and deadline <= now:
            cluster.remove("pods", pod["metadata"]["namespace"], pod["metadata"]["name"])


def _join(cluster: FakeCluster, name: str, labels: dict[str, str], address: str, now: float) -> None:
    known = cluster.objects.get(("nodes", None, name))
    if known is not None:
        if not _is_ready(known):
            cluster.put("nodes", {**known, "status": _status("True", known, now)})
        return
    raw: dict[str, Any] = {"metadata": {"name": name, "labels": labels}, "spec": {}}
    raw["status"] = {"addresses": [{"type": "InternalIP", "address": address}]}
    cluster.put("nodes", {**raw, "status": _status("True", raw, now)})


def _is_ready(raw: RawObject) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in raw["status"].get("conditions", ()))


def _status(ready: str, raw: RawObject, now: float) -> dict[str, Any]:
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": render_time(now)}
    return {**raw["status"], "conditions": [condition]}
