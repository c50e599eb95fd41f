"""A test cluster is what a cloud's is, also where its machines are taken away, and leaves its machine as it was."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from stepcluster import cgroups, cleaning, lifecycle, processes, state
from stepcluster.api import Cluster, cluster_up
from stepcluster.controlplane import NODE_MONITOR_GRACE_S
from stepcluster.errors import ClusterExistsError, CommandError, FaultError, NoClusterError
from stepcluster.layout import Layout, parse_routes
from stepcluster.machine import run
from stepcluster.shelljobs import container, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SAVES = "trap 'echo saving; sleep 2; echo saved > /dev/termination-log; exit 75' TERM; while :; do sleep 0.1; done"
IGNORES = "trap 'echo no' TERM; while :; do sleep 0.1; done"
SETTINGS = ("kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory", "net/netfilter/nf_conntrack_max")


@pytest.fixture
def start(cluster: Cluster) -> Iterator[Callable[[str, str, str], None]]:
    """Start a pod: start(name, node, script)."""
    cluster.load_shell_image()
    names: list[str] = []

    def start_pod(name: str, node: str, script: str) -> None:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": node},
                "tolerations": [{"operator": "Exists", "effect": "NoSchedule"}],
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 120,
                "containers": [container("main", script)],
            },
        }
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(pod))
        names.append(name)
        cluster.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=200s", timeout_s=210)

    yield start_pod
    for name in names:
        cluster.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--ignore-not-found")


def get_pod(cluster: Cluster, name: str) -> dict[str, Any]:
    pod: dict[str, Any] = json.loads(cluster.kubectl("get", "pod", name, "-o", "json"))
    return pod


def disruption(pod: dict[str, Any]) -> str:
    """Return the reason of the pod's disruption; empty if it has none."""
    return next((c["reason"] for c in pod["status"]["conditions"] if c["type"] == "DisruptionTarget"), "")


def node_ready(cluster: Cluster, node: str) -> str:
    """Return the status of the node's condition Ready; empty if there is no such node."""
    try:
        conditions = json.loads(cluster.kubectl("get", "node", node, "-o", "json"))["status"]["conditions"]
    except CommandError:
        return ""
    return next(str(item["status"]) for item in conditions if item["type"] == "Ready")


def run_pod(cluster: Cluster, name: str, script: str) -> str:
    """Run a pod with a shell until it has ended with success, and return its output."""
    image = cluster.load_shell_image()
    cluster.kubectl("run", name, f"--image={image}", "--restart=Never", "--command", "--", "sh", "-c", script)
    ended = ("--for=jsonpath={.status.phase}=Succeeded", "--timeout=200s")
    cluster.kubectl("wait", f"pod/{name}", *ended, timeout_s=210)
    printed = cluster.kubectl("logs", name)
    cluster.kubectl("delete", "pod", name, "--now")
    return printed


def test_a_pod_resolves_names_and_reaches_the_storage_and_nothing_outside(cluster: Cluster) -> None:
    upload = f"{cluster.gcs_host_url}/upload/storage/v1/b/checkpoints/o?uploadType=media&name=from-machine"
    urllib.request.urlopen(urllib.request.Request(upload, data=b"seen", method="POST"), timeout=10).close()
    address = cluster.gcs_url.removeprefix("http://")
    ask = f"GET /storage/v1/b/checkpoints/o/from-machine?alt=media HTTP/1.0\\r\\nHost: {address}\\r\\n\\r\\n"
    printed = run_pod(
        cluster,
        "reaches",
        "nslookup -type=a kubernetes.default.svc.cluster.local; nc -w 5 203.0.113.1 80 2>&1;"
        f" printf '{ask}' | nc -w 5 {address.replace(':', ' ')}",
    )
    assert re.search(r"Address: 10\.\d+\.128\.1\n", printed)
    assert "unreachable" in printed, "it hears so at once"
    assert printed.endswith("seen")


def test_a_spot_preemption_tells_the_pods_waits_15_s_and_takes_the_machine(
    cluster: Cluster, start: Callable[[str, str, str], None]
) -> None:
    start("saves", "tpu-1", SAVES)
    start("ignores", "tpu-1", IGNORES)
    began_s = time.time()
    cluster.faults.spot_preemption("tpu-1")
    assert node_ready(cluster, "tpu-1") == ""
    ends = {}
    for name in ("saves", "ignores"):
        pod = get_pod(cluster, name)
        assert (pod["status"]["phase"], disruption(pod)) == ("Failed", "TerminationByKubelet")
        ends[name] = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ends["saves"]["exitCode"], ends["saves"]["message"].strip()) == (75, "saved")
    assert ends["ignores"]["exitCode"] == 137
    # Until the machine is off and its node deleted takes longer, on a busy machine much.
    assert 14 < datetime.fromisoformat(ends["ignores"]["finishedAt"]).timestamp() - began_s < 30
    cluster.faults.power_on("tpu-1", fresh=True)
    start("again", "tpu-1", IGNORES)


def test_a_power_cut_is_seen_after_the_grace_and_the_node_comes_back(
    cluster: Cluster, start: Callable[[str, str, str], None]
) -> None:
    start("lost", "tpu-0", IGNORES)
    cluster.faults.power_cut("tpu-0")
    with pytest.raises(FaultError, match="tpu-0 is off"):
        cluster.faults.power_cut("tpu-0")
    # Kubernetes' own grace is 50 s, and its own toleration 300.
    until(lambda: node_ready(cluster, "tpu-0") == "Unknown", 2 * NODE_MONITOR_GRACE_S)
    until(
        lambda: disruption(get_pod(cluster, "lost")) == "DeletionByTaintManager",
        65,
        seen=lambda: str(get_pod(cluster, "lost")["status"]),
    )
    assert get_pod(cluster, "lost")["status"]["phase"] == "Running"
    assert node_ready(cluster, "tpu-1") == "True"
    cluster.faults.power_on("tpu-0")
    start("after", "tpu-0", IGNORES)


def machine() -> tuple[object, ...]:
    """Return what a cluster could have changed of the machine, besides that with the cluster's own names."""
    return (
        set(cleaning.mount_points(Path("/proc/self/mountinfo").read_text())),
        run(["nft", "list", "tables"]),
        Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        [path.read_text() for name in SETTINGS if (path := Path("/proc/sys", name)).exists()],
        Path("/usr/libexec/kubernetes").exists(),
    )


def assert_nothing_left(layout: Layout) -> None:
    assert not layout.folder.exists()
    assert list(processes.marked(processes.CLUSTER_MARK, str(layout.folder))) == []
    assert cgroups.existing(f"stepkeeper-{layout.name}-") == []
    assert not Path("/sys/class/net", layout.host_interface).exists()
    assert layout.network not in parse_routes(Path("/proc/net/route").read_text())


def test_a_second_cluster_runs_beside_replaces_a_crashed_one_and_goes_without_a_trace(
    cluster: Cluster,
) -> None:
    before = machine()
    crashed = lifecycle.start("second", n_tpu_nodes=0)
    os.kill(crashed.launcher.namespaces.pid, signal.SIGKILL)
    until(lambda: not state.is_running("second"), 100)
    with pytest.raises(NoClusterError, match="no cluster 'second' is running"):
        Cluster.attach("second")
    with cluster_up("second", n_tpu_nodes=1) as second:
        assert second.gcs_url != cluster.gcs_url
        assert second.nodes == ("system", "tpu-0")
        with pytest.raises(ClusterExistsError, match="second"):
            lifecycle.start("second")
        run_pod(second, "here", "true")
        assert run_pod(cluster, "there", "echo still").strip() == "still"
        second.faults.power_cut("tpu-0")
        layout = state.read("second").layout()
    assert_nothing_left(layout)
    assert machine() == before


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_cluster_whose_start_is_interrupted(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "stepcluster", "up", "--name", "starting", "--tpu-nodes", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            while "API server ready" not in process.stderr.readline():
                assert process.poll() is None
            layout = state.read("starting").layout()
            process.send_signal(number)
            assert process.wait(200) == (130 if number == signal.SIGINT else -number)
            if number == signal.SIGKILL:
                lifecycle.stop("starting")
            assert_nothing_left(layout)
        finally:
            process.kill()
            if state.cluster_folder("starting").exists():
                lifecycle.stop("starting")
