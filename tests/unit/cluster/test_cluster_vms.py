"""Virtual machines of a test cluster: names, numbers, metadata, and what a Cloud TPU API's events make of them."""

import copy
import json
import signal
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import yaml

from stepcluster import certificates
from stepcluster import layout as places
from stepcluster.errors import ClusterError, StartError
from stepcluster.layout import N_NODES, Layout, check_node_name
from stepcluster.nodeinit import NodePlan, VmPlan
from stepcluster.nodes import Node, NodeRunner
from stepcluster.parts import Parts
from stepcluster.vms import kubeadm, records
from stepcluster.vms.machines import VirtualMachines
from stepcluster.vms.metadata import MetadataServer
from stepcluster.vms.tpu_events import WorkerEvent, is_last_to_exit


@pytest.fixture
def layout() -> Iterator[Layout]:
    # pytest's own folders have paths that are too long for the sockets of nodes.
    with tempfile.TemporaryDirectory() as folder:
        yield Layout(name="dev", block=128, folder=Path(folder))


def create(layout: Layout, name: str) -> Node:
    return records.create(
        layout, name, n_fixed=3, tpu_chips=4, metadata={"a": "b"}, startup_script="#!/bin/sh\n"
    )


def test_each_machine_has_the_first_number_that_is_free_behind_those_of_the_fixed_nodes(
    layout: Layout,
) -> None:
    assert [create(layout, name).number for name in ("one", "two", "three")] == [3, 4, 5]
    (layout.node_folder("two") / "vm" / records.FILE).unlink()
    assert create(layout, "four").number == 4
    assert [node.name for node in records.read_all(layout)] == ["four", "one", "three"]


def test_a_machine_is_read_as_it_was_written(layout: Layout) -> None:
    assert records.read(layout, "one") is None
    assert records.read(layout, create(layout, "one").name) == Node(
        name="one", number=3, tpu_chips=4, is_vm=True
    )


def test_a_full_cluster_says_so(layout: Layout) -> None:
    for number in range(3, N_NODES):
        create(layout, f"vm-{number}")
    with pytest.raises(ClusterError, match="delete virtual machines first"):
        create(layout, "one-more")


def test_a_machines_labels_and_taints_are_its_scripts_to_say() -> None:
    node = Node(name="one", number=3, tpu_chips=4, is_vm=True)
    assert (node.labels, tuple(node.taints)) == ({}, ())


@pytest.mark.parametrize("name", ["", "1st", "with_underscore", "a-", "x" * 64])
def test_names_that_no_node_can_have_are_refused(layout: Layout, name: str) -> None:
    with pytest.raises(ClusterError, match="can't be a node's name"):
        check_node_name(layout, name)


def test_a_name_for_whose_sockets_the_path_is_too_long_is_refused() -> None:
    folder = Path("/var/tmp/stepkeeper/clusters/a-cluster-with-20-ch")
    layout = Layout(name="a-cluster-with-20-ch", block=128, folder=folder)
    assert check_node_name(layout, "tpu-0")
    with pytest.raises(ClusterError, match="shorter one for the cluster"):
        check_node_name(layout, "t1v-n-0123abcd-w-0")


def test_no_two_ports_of_any_two_nodes_are_the_same() -> None:
    firsts = (places.KUBELET_PORT, places.KUBELET_HEALTH_PORT, places.METADATA_PORT)
    ports = [first + number for first in firsts for number in range(N_NODES)]
    ports += [places.PROXY_HEALTH_PORT, places.PROXY_METRICS_PORT, places.JOBSET_WEBHOOK_PORT]
    ports += [places.API_PORT, places.GCS_PORT, places.JOBSET_HEALTH_PORT, places.ETCD_PORT]
    assert len(set(ports)) == len(ports)


def test_an_authority_that_was_written_signs_again(layout: Layout) -> None:
    made = certificates.create_authority(layout.certificates, "dev")
    loaded = certificates.load_authority(layout.certificates)
    assert loaded.certificate == made.certificate
    certificates.issue_serving(loaded, layout, "vm")
    assert (layout.certificates / "kubelet-vm.crt").exists()
    text = certificates.write_kubeconfig(layout, layout.certificates, "kubelet-vm")
    assert yaml.safe_load(text)["current-context"] == "stepkeeper-dev"


EVENT = {
    "TPU_EVENT": "gone",
    "TPU_REASON": "preempted",
    "TPU_NODE": "projects/p/locations/z/nodes/slice",
    "TPU_NODE_ID": "slice",
    "TPU_NODE_NUMBER": "3",
    "TPU_WORKER_ID": "1",
    "TPU_N_WORKERS": "2",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_CHIPS_PER_HOST": "4",
    "TPU_ZONE": "us-west4-a",
    "TPU_ADDRESSES": "10.160.0.2,10.160.0.3",
    "TPU_DEADLINE_S": "",
    "TPU_ADMIN": "127.0.0.1:1",
}


def event(tmp_path: Path, **changes: str) -> WorkerEvent:
    file = tmp_path / "node-metadata.json"
    file.write_text('{"stepkeeper-node-labels": "a=b"}', encoding="utf-8")
    return WorkerEvent.read({**EVENT, "TPU_METADATA_FILE": str(file), **changes})


def test_a_host_has_one_name_for_its_life_and_another_when_the_node_is_made_anew(tmp_path: Path) -> None:
    host = event(tmp_path)
    assert host.vm == event(tmp_path, TPU_EVENT="ready").vm
    assert host.vm.endswith("-w-1")
    assert event(tmp_path, TPU_WORKER_ID="0").vm == host.vm.removesuffix("1") + "0"
    assert event(tmp_path, TPU_NODE_NUMBER="4").vm != host.vm


def test_a_host_has_the_nodes_metadata_and_what_the_cloud_adds(tmp_path: Path) -> None:
    attributes = event(tmp_path).attributes
    assert attributes["stepkeeper-node-labels"] == "a=b"
    assert (attributes["instance-id"], attributes["agent-worker-number"]) == ("slice", "1")
    assert yaml.safe_load(attributes["tpu-env"])["NODE_ID"] == "slice"
    endpoints = attributes["worker-network-endpoints"].split(",")
    assert [endpoint.split(":")[2] for endpoint in endpoints] == ["10.160.0.2", "10.160.0.3"]


def test_the_service_is_told_once_the_processes_of_all_workers_have_exited(tmp_path: Path) -> None:
    assert not is_last_to_exit(event(tmp_path, TPU_WORKER_ID="1"))
    assert is_last_to_exit(event(tmp_path, TPU_WORKER_ID="0"))


JOIN = {
    "apiVersion": kubeadm.API_VERSION,
    "kind": "JoinConfiguration",
    "discovery": {
        "bootstrapToken": {"apiServerEndpoint": "10.128.0.2:6443", "token": "t", "caCertHashes": []}
    },
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "isn't pinned"),
        ({"apiServerEndpoint": "10.0.0.1:6443"}, "nothing answers at 10.0.0.1:6443"),
    ],
)
def test_joining_another_cluster_fails(layout: Layout, change: dict[str, str], message: str) -> None:
    certificates.create_authority(layout.certificates, "dev")
    vm = VmPlan(
        name="one",
        address=str(layout.address),
        metadata_address="",
        folder="",
        ca=str(layout.certificates / "ca.crt"),
    )
    plan = NodePlan(
        folder=str(layout.folder), kube="", api_host="", kubelet_arguments=(), torch_folder="", vm=vm
    )
    configuration = copy.deepcopy(JOIN)
    configuration["discovery"]["bootstrapToken"].update(change)  # type: ignore[index]
    with pytest.raises(kubeadm.JoinError, match=message):
        kubeadm.join(plan, vm, configuration)


@pytest.fixture
def metadata(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "metadata.json"
    file.write_text(json.dumps({"one": "1", "two": "2"}), encoding="utf-8")
    with MetadataServer(("127.0.0.1", 0), file) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://{server.address}/computeMetadata/v1/instance"
        server.shutdown()
        thread.join()


def get(url: str, **headers: str) -> tuple[int, str, str]:
    request = urllib.request.Request(url, headers={k.replace("_", "-"): v for k, v in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["Metadata-Flavor"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Metadata-Flavor"], ""


def test_metadata_is_answered_to_whoever_sends_the_header(metadata: str) -> None:
    assert get(f"{metadata}/attributes/one", Metadata_Flavor="Google") == (200, "Google", "1")
    assert get(f"{metadata}/attributes/", Metadata_Flavor="Google") == (200, "Google", "one\ntwo\n")
    assert get(f"{metadata}/attributes/three", Metadata_Flavor="Google")[0] == 404
    assert get(f"{metadata}/attributes/one")[0] == 403
    assert get(f"{metadata}/attributes/one", Metadata_Flavor="Other")[0] == 403


class GoingNode:
    """A machine that is on when it is looked at, and off before the next look, as at the end of its grace."""

    def __init__(self) -> None:
        self.waited_for = 0

    def is_on(self, _name: str) -> bool:
        return not self.waited_for

    def tell(self, name: str, number: signal.Signals) -> None:
        NodeRunner.tell(cast(NodeRunner, self), name, number)

    def wait_off(self, name: str, *, timeout_s: float) -> None:
        assert timeout_s > 0
        self.waited_for += 1
        if self.waited_for == 1:
            raise StartError(f"the end of node {name}: not within {timeout_s:g} s")


def test_a_machine_that_goes_off_by_itself_at_the_end_of_its_grace_is_stopped(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = create(layout, "one").name
    runner = GoingNode()
    monkeypatch.setattr(runner, "layout", layout, raising=False)
    machines = VirtualMachines(parts=cast(Parts, SimpleNamespace(layout=layout, runner=runner)))
    machines.stop(name)
    assert (machines.names(), runner.waited_for) == ((), 2)
