"""The machines of a queued resource join the cluster through the startup script that users are given."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from stepcluster.api import Cluster
from stepcluster.shelljobs import container, until
from stepcluster.vms.cloud_user import CloudUser
from stepcluster.vms.tpu_cloud import join_script
from tpuapi.remote import RemoteTpu

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

UID = "5c1f1f9e-0000-4000-8000-000000000001"
LABELS = {
    "stepkeeper.dev/queued-resource-uid": UID,
    "stepkeeper.dev/queued-resource": "v4",
    "stepkeeper.dev/queued-resource-namespace": "default",
}
TAINT = {"key": "google.com/tpu", "value": "present", "effect": "NoSchedule"}
SAVES = "trap 'sleep {}; echo saved > /dev/termination-log; exit 75' TERM; while :; do sleep 0.1; done"


def list_nodes(cluster: Cluster) -> dict[str, Mapping[str, Any]]:
    """Return the nodes with the resource's labels, by cloud node and host."""
    selector = f"stepkeeper.dev/queued-resource-uid={UID}"
    return {
        f"{node['metadata']['labels']['stepkeeper.dev/slice']}-w-{name_of(node)[-1]}": node
        for node in json.loads(cluster.kubectl("get", "nodes", "-l", selector, "-o", "json"))["items"]
    }


def name_of(node: Mapping[str, Any]) -> str:
    return str(node["metadata"]["name"])


def is_joined(node: Mapping[str, Any]) -> bool:
    ready = any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])
    return ready and "google.com/tpu" in node["status"]["allocatable"]


def start_pod(cluster: Cluster, name: str, node: str, script: str) -> None:
    """Start a pod that asks for a machine's chips."""
    spec = {
        "nodeSelector": {"stepkeeper.dev/queued-resource-uid": UID, "kubernetes.io/hostname": node},
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}],
        "restartPolicy": "Never",
        "containers": [container("main", script, resources={"limits": {"google.com/tpu": "4"}})],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(pod))


def end_of(cluster: Cluster, pod: str) -> tuple[int, str]:
    """Return exit code and message of the pod's container, or -1."""
    found = json.loads(cluster.kubectl("get", "pod", pod, "-o", "json"))
    ended = found["status"]["containerStatuses"][0]["state"].get("terminated") or {"exitCode": -1}
    return ended["exitCode"], ended.get("message", "").strip()


def test_machines_join_with_labels_taint_and_chips(cluster: Cluster, tpu_cloud: RemoteTpu) -> None:
    """In a maintenance the pods on both hosts save. Then the machines come back with their disks, and join no more."""
    cluster.load_shell_image()
    user = CloudUser(tpu_cloud.address)
    metadata = {
        "startup-script": join_script(cluster.join_terms()),
        "stepkeeper-node-labels": ",".join(f"{key}={value}" for key, value in LABELS.items()),
    }

    def wait(is_so: Any, timeout_s: float = 200) -> None:
        until(is_so, timeout_s, seen=lambda: str(tpu_cloud.hook_runs()))

    def all_joined() -> bool:
        return [*map(is_joined, list_nodes(cluster).values())] == [True, True]

    user.create(
        "kept",
        metadata=metadata,
        accelerator_type="v4-16",
        runtime_version="tpu-vm-base",
        autocheckpoint_enabled=True,
    )
    wait(all_joined, 300)
    nodes = list_nodes(cluster)
    names = {host: name_of(node) for host, node in nodes.items()}
    assert sorted(nodes) == ["kept-w-0", "kept-w-1"]
    for node in nodes.values():
        assert LABELS.items() <= node["metadata"]["labels"].items()
        assert node["metadata"]["labels"]["kubernetes.io/hostname"] == name_of(node)
        assert node["status"]["allocatable"]["google.com/tpu"] == "4"
        assert TAINT in node["spec"]["taints"]

    start_pod(cluster, "saves-0", names["kept-w-0"], SAVES.format(1))
    start_pod(cluster, "saves-1", names["kept-w-1"], SAVES.format(5))
    cluster.kubectl("wait", "pod/saves-0", "pod/saves-1", "--for=condition=Ready", "--timeout=110s")
    tpu_cloud.do("announce_maintenance", node="kept", starts_in_s=1, lasts_s=1)
    wait(lambda: not any(map(cluster.vms.is_on, names.values())))
    assert end_of(cluster, "saves-0") == end_of(cluster, "saves-1") == (75, "saved")
    wait(lambda: all(map(cluster.vms.is_on, names.values())) and all_joined())
    assert {host: node["metadata"]["uid"] for host, node in list_nodes(cluster).items()} == {
        host: node["metadata"]["uid"] for host, node in nodes.items()
    }
    wait(lambda: all("joined already" in cluster.vms.console(name) for name in names.values()), 100)

    user.delete("kept")
    wait(lambda: user.state("kept") == "" and not cluster.vms.names())
    assert names.keys() == list_nodes(cluster).keys(), "a machine that goes leaves its Node object"
    assert [each for each in tpu_cloud.hook_runs() if each["exit_code"]] == []
    cluster.kubectl(
        "delete", "pod", "saves-0", "saves-1", "--force", "--grace-period=0", "--ignore-not-found"
    )
    cluster.kubectl("delete", "nodes", *names.values())
