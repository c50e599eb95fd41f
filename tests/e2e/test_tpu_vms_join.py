"""The machines of a queued resource join the cluster through the startup script that users are given."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stepcluster.api import Cluster
from stepcluster.machine import run
from stepcluster.vms.cloud_user import CloudUser
from stepcluster.vms.tpu_cloud import JOIN_SCRIPT, join_script
from tpuapi.remote import RemoteTpu

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

UID = "5c1f1f9e-0000-4000-8000-000000000001"
LABELS = {
    "stepkeeper.dev/queued-resource-uid": UID,
    "stepkeeper.dev/queued-resource": "v5e",
    "stepkeeper.dev/queued-resource-namespace": "default",
}
TAINT = {"key": "google.com/tpu", "value": "present", "effect": "NoSchedule"}
SAVES = "trap 'sleep 1; echo saved > /dev/termination-log; exit 75' TERM; while :; do sleep 0.1; done"


class Machines:
    """Queued resources of one test, asked for by hand, and the nodes that their machines become."""

    def __init__(self, cluster: Cluster, cloud: RemoteTpu) -> None:
        self.cluster = cluster
        self.cloud = cloud
        self._user = CloudUser(cloud.address)
        self._created: list[str] = []

    def create(self, resource: str, *, count: int = 1, **node: object) -> None:
        metadata = {
            "startup-script": join_script(self.cluster.join_terms()),
            "stepkeeper-node-labels": ",".join(f"{key}={value}" for key, value in LABELS.items()),
        }
        self._user.create(resource, count=count, metadata=metadata, **node)
        self._created.append(resource)

    def state(self, resource: str) -> str:
        """Return the state of a queued resource; empty if it is gone."""
        return self._user.state(resource)

    def delete(self, resource: str) -> None:
        self._user.delete(resource)
        self.until(lambda: self.state(resource) == "", 30, f"{resource} is gone")

    def delete_all(self) -> None:
        for resource in self._created:
            self.delete(resource)
        self.until(lambda: not self.cluster.vms.names(), 200, "no machine is left")
        self.cluster.kubectl("delete", "nodes", "-l", f"stepkeeper.dev/queued-resource-uid={UID}")

    def joined(self) -> dict[str, Mapping[str, Any]]:
        """Return the Ready nodes with chips that have the resource's labels, by cloud node and host."""
        return {
            f"{node['metadata']['labels']['stepkeeper.dev/cloud-node']}-w-{name_of(node)[-1]}": node
            for node in self.nodes()
            if "google.com/tpu" in node["status"]["allocatable"] and is_ready(node)
        }

    def nodes(self) -> list[Mapping[str, Any]]:
        selector = f"stepkeeper.dev/queued-resource-uid={UID}"
        listed = json.loads(self.cluster.kubectl("get", "nodes", "-l", selector, "-o", "json"))
        return list(listed["items"])

    def until(self, is_true: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < deadline, (
                f"{what}: not within {timeout_s:g} s; {self.cloud.hook_runs()}"
            )
            time.sleep(0.3)


def is_ready(node: Mapping[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])


@pytest.fixture
def machines(cluster: Cluster, tpu_cloud: RemoteTpu) -> Iterator[Machines]:
    made = Machines(cluster, tpu_cloud)
    yield made
    made.delete_all()


@pytest.fixture
def pods(cluster: Cluster) -> Iterator[Callable[[str, str, str], None]]:
    """Run a pod that asks for a machine's chips: pods(name, node, script)."""
    image = cluster.load_shell_image()
    names: list[str] = []

    def run(name: str, node: str, script: str) -> None:
        container = {
            "name": "main",
            "image": image,
            "command": ["sh", "-c", script],
            "resources": {"limits": {"google.com/tpu": "4"}},
        }
        spec = {
            "nodeSelector": {
                "stepkeeper.dev/queued-resource-uid": UID,
                "kubernetes.io/hostname": node,
            },
            "tolerations": [{"key": "google.com/tpu", "operator": "Exists"}],
            "restartPolicy": "Never",
            "containers": [container],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(pod))
        names.append(name)

    yield run
    for name in names:
        cluster.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--ignore-not-found")


def end_of(cluster: Cluster, pod: str) -> tuple[int, str]:
    """Return exit code and message of the pod's container, or -1."""
    found = json.loads(cluster.kubectl("get", "pod", pod, "-o", "json"))
    ended = found["status"]["containerStatuses"][0]["state"].get("terminated") or {"exitCode": -1}
    return ended["exitCode"], ended.get("message", "").strip()


def name_of(node: Mapping[str, Any]) -> str:
    return str(node["metadata"]["name"])


def test_machines_join_with_labels_taint_and_chips(
    cluster: Cluster, machines: Machines, pods: Callable[[str, str, str], None]
) -> None:
    machines.create("default-v5e", count=2)
    machines.until(lambda: len(machines.joined()) == 2, 300, "two machines join")
    assert machines.state("default-v5e") == "ACTIVE"
    nodes = machines.joined()
    assert sorted(nodes) == ["default-v5e-0-w-0", "default-v5e-1-w-0"]
    for node in nodes.values():
        assert LABELS.items() <= node["metadata"]["labels"].items()
        assert node["metadata"]["labels"]["kubernetes.io/hostname"] == name_of(node)
        assert node["status"]["allocatable"]["google.com/tpu"] == "4"
        assert TAINT in node["spec"]["taints"]
    host, _, port = machines.cloud.address.rpartition(":")
    pods(
        "reaches",
        name_of(nodes["default-v5e-1-w-0"]),
        f"nc -w 5 {host} {port} < /dev/null > /dev/null && echo reached",
    )
    cluster.kubectl("wait", "pod/reaches", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=110s")
    assert cluster.kubectl("logs", "reaches").endswith("reached\n")


def test_a_preempted_machine_shuts_down_in_order_and_leaves_its_node_object(
    cluster: Cluster, machines: Machines, pods: Callable[[str, str, str], None]
) -> None:
    machines.create("default-v5e", count=2)
    machines.until(lambda: len(machines.joined()) == 2, 300, "two machines join")
    nodes = machines.joined()
    pods("saves", name_of(nodes["default-v5e-0-w-0"]), SAVES)
    cluster.kubectl("wait", "pod/saves", "--for=condition=Ready", "--timeout=110s")
    machines.cloud.do("preempt", node="default-v5e-0")
    preempted = name_of(nodes["default-v5e-0-w-0"])
    machines.until(lambda: not cluster.vms.is_on(preempted), 200, "the preempted machine is off")
    assert end_of(cluster, "saves") == (75, "saved")
    machines.until(lambda: machines.state("default-v5e") == "SUSPENDED", 200, "SUSPENDED")
    machines.until(lambda: cluster.vms.names() == (), 200, "the other machine goes with its resource")
    left = cluster.kubectl("get", "nodes", "-o", "name").split()
    assert {f"node/{name_of(node)}" for node in nodes.values()} <= set(left)
    machines.delete("default-v5e")
    assert [run for run in machines.cloud.hook_runs() if run["exit_code"]] == []


def test_maintenance_lets_the_training_save_and_the_machine_comes_back_with_its_disk(
    cluster: Cluster, machines: Machines, pods: Callable[[str, str, str], None]
) -> None:
    machines.create(
        "kept", accelerator_type="v4-16", runtime_version="tpu-vm-base", autocheckpoint_enabled=True
    )
    machines.until(lambda: len(machines.joined()) == 2, 300, "both hosts of the slice join")
    before = {host: name_of(node) for host, node in machines.joined().items()}
    assert sorted(before) == ["kept-w-0", "kept-w-1"]
    pods("saves-0", before["kept-w-0"], SAVES)
    pods("saves-1", before["kept-w-1"], SAVES.replace("sleep 1", "sleep 5"))
    cluster.kubectl("wait", "pod/saves-0", "pod/saves-1", "--for=condition=Ready", "--timeout=110s")
    machines.cloud.do("announce_maintenance", node="kept", starts_in_s=1, lasts_s=1)
    machines.until(lambda: not any(map(cluster.vms.is_on, before.values())), 200, "the machines are off")
    assert end_of(cluster, "saves-0") == end_of(cluster, "saves-1") == (75, "saved")
    uids = {node["metadata"]["uid"] for node in machines.nodes()}
    machines.until(lambda: all(map(cluster.vms.is_on, before.values())), 200, "the machines are on again")
    machines.until(lambda: len(machines.joined()) == 2, 200, "they are Ready again")
    assert {node["metadata"]["uid"] for node in machines.nodes()} == uids
    for name in before.values():
        machines.until(lambda name=name: "joined already" in cluster.vms.console(name), 100, "its disk")  # type: ignore[misc]


def test_only_the_first_cloud_nodes_are_machines(cluster: Cluster, machines: Machines) -> None:
    for index in range(4):
        machines.create(f"many{index}")
    machines.until(lambda: len(machines.joined()) == 2, 300, "two machines join")
    machines.until(lambda: machines.state("many3") == "ACTIVE", 100, "the others are in the API")
    assert len(cluster.vms.names()) == 2


def test_the_examples_manifests_are_accepted(cluster: Cluster, tpu_cloud: RemoteTpu) -> None:
    for name in ("queued-resource.yaml", "job.yaml"):
        cluster.kubectl("apply", "--dry-run=server", "-f", JOIN_SCRIPT.parent / name)


def test_the_command_starts_lists_and_stops_a_machine(cluster: Cluster, tmp_path: Path) -> None:
    def vm(*arguments: str) -> str:
        return run([sys.executable, "-m", "stepcluster", "vm", *arguments, "--name", cluster.name])

    script, metadata = tmp_path / "script", tmp_path / "metadata"
    address = "http://$GCE_METADATA_HOST/computeMetadata/v1/instance"
    ask = "curl --silent --retry 9 --retry-delay 1 --retry-connrefused --header 'Metadata-Flavor: Google'"
    script.write_text(f"#!/bin/sh\n{ask} {address}/attributes/word\n{ask} {address}/name\n", encoding="utf-8")
    metadata.write_text('{"word": "hello "}', encoding="utf-8")
    vm("start", "by-hand", "--metadata-file", str(metadata), "--startup-script", str(script), "--no-wait")
    try:
        assert vm("list") == "by-hand\ton\n"
        deadline = time.monotonic() + 100
        while cluster.vms.console("by-hand") != "hello by-hand":
            assert time.monotonic() < deadline, cluster.vms.console("by-hand")
            time.sleep(0.2)
        vm("stop", "by-hand", "--grace", "0", "--keep-disk")
        assert vm("list") == "by-hand\toff\n"
    finally:
        vm("stop", "by-hand", "--grace", "0")
    assert vm("list") == ""
