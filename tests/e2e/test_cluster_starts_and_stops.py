"""A cluster starts, works, and leaves the machine as it was, however it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepcluster import cgroups, cleaning, lifecycle, processes, state
from stepcluster.api import Cluster, cluster_up
from stepcluster.errors import ClusterExistsError, NoClusterError
from stepcluster.layout import Layout, parse_routes
from stepcluster.machine import run, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Machine:
    """The parts of the machine that a cluster could have changed, besides those with the cluster's own names."""

    mounts: frozenset[Path]
    tables: str
    forwarding: str
    settings: tuple[str, ...]
    libexec: bool


def machine() -> Machine:
    settings = (
        "kernel/panic",
        "kernel/panic_on_oops",
        "vm/overcommit_memory",
        "net/netfilter/nf_conntrack_max",
    )
    return Machine(
        mounts=frozenset(cleaning.mount_points(Path("/proc/self/mountinfo").read_text())),
        tables=run(["nft", "list", "tables"]),
        forwarding=Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        settings=tuple(path.read_text() for name in settings if (path := Path("/proc/sys", name)).exists()),
        libexec=Path("/usr/libexec/kubernetes").exists(),
    )


def assert_nothing_left(layout: Layout) -> None:
    assert not layout.folder.exists()
    assert list(processes.marked(processes.CLUSTER_MARK, str(layout.folder))) == []
    assert cgroups.existing(f"stepkeeper-{layout.name}-") == []
    assert not Path("/sys/class/net", layout.host_interface).exists()
    assert layout.network not in parse_routes(Path("/proc/net/route").read_text())


def run_pod(cluster: Cluster, name: str, script: str, *options: str) -> str:
    """Run a pod with a shell until it has ended with success, and return its output."""
    image = cluster.load_shell_image()
    cluster.kubectl(
        "run", name, f"--image={image}", "--restart=Never", *options, "--command", "--", "sh", "-c", script
    )
    cluster.kubectl(
        "wait", f"pod/{name}", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=200s", timeout_s=210
    )
    printed = cluster.kubectl("logs", name)
    cluster.kubectl("delete", "pod", name, "--now")
    return printed


def test_nodes_are_what_a_cloud_s_tpu_nodes_are(cluster: Cluster) -> None:
    assert cluster.nodes == ("system", "tpu-0", "tpu-1")
    nodes = {
        item["metadata"]["name"]: item
        for item in json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    }
    for name in cluster.tpu_nodes:
        labels = nodes[name]["metadata"]["labels"]
        assert labels["cloud.google.com/gke-tpu-accelerator"] == "tpu-v5-lite-podslice"
        assert labels["cloud.google.com/gke-tpu-topology"] == "2x2"
        assert labels["cloud.google.com/gke-spot"] == "true"
        assert nodes[name]["status"]["allocatable"]["google.com/tpu"] == "4"
        taints = {taint["key"]: taint["effect"] for taint in nodes[name]["spec"]["taints"]}
        assert taints == {"google.com/tpu": "NoSchedule", "cloud.google.com/gke-spot": "NoSchedule"}
    assert "google.com/tpu" not in nodes["system"]["status"]["allocatable"]
    assert "taints" not in nodes["system"]["spec"]


def test_a_pod_runs_is_logged_and_resolves_names(cluster: Cluster) -> None:
    printed = run_pod(cluster, "plain", "echo it runs; nslookup -type=a kubernetes.default.svc.cluster.local")
    assert printed.startswith("it runs\n")
    assert re.search(r"Address: 10\.\d+\.128\.1\n", printed)


def test_storage_is_the_same_for_pods_and_machine(cluster: Cluster) -> None:
    url = f"{cluster.gcs_host_url}/upload/storage/v1/b/{cluster.gcs_bucket}/o?uploadType=media&name=from-machine"
    request = urllib.request.Request(url, data=b"seen", method="POST")
    urllib.request.urlopen(request, timeout=10).close()
    host, _, port = cluster.gcs_url.removeprefix("http://").partition(":")
    path = f"/storage/v1/b/{cluster.gcs_bucket}/o/from-machine?alt=media"
    ask = f"printf 'GET {path} HTTP/1.0\\r\\nHost: {host}:{port}\\r\\n\\r\\n' | nc -w 5 {host} {port}"
    assert run_pod(cluster, "storage", ask).endswith("seen")


def test_pods_have_no_way_out_and_are_told_at_once(cluster: Cluster) -> None:
    assert "unreachable" in run_pod(cluster, "outside", "nc -w 5 203.0.113.1 80 2>&1 || true")


def test_requests_are_in_the_audit_log_with_who_made_them(cluster: Cluster) -> None:
    cluster.kubectl("create", "configmap", "audited")
    cluster.kubectl("delete", "configmap", "audited")

    def verbs() -> set[str]:
        entries = cluster.audit_entries("kubernetes-admin")
        return {entry["verb"] for entry in entries if entry.get("objectRef", {}).get("name") == "audited"}

    # A request is in the log a moment after its answer.
    wait_until(lambda: verbs() >= {"create", "delete"}, "both requests in the audit log", timeout_s=100)
    controllers = {entry["user"]["username"] for entry in cluster.audit_entries()}
    assert "system:serviceaccount:kube-system:deployment-controller" in controllers


def test_a_jobset_runs_its_pods_on_the_tpu_nodes_to_completion(cluster: Cluster) -> None:
    container = {
        "name": "main",
        "image": cluster.load_shell_image(),
        "command": ["sh", "-c", "nslookup -type=a workers-main-0-0.workers.default.svc.cluster.local"],
        "resources": {"limits": {"google.com/tpu": 4}},
    }
    tolerations = [
        {"key": key, "operator": "Exists"} for key in ("google.com/tpu", "cloud.google.com/gke-spot")
    ]
    pod = {"restartPolicy": "OnFailure", "tolerations": tolerations, "containers": [container]}
    job = {"parallelism": 2, "completions": 2, "template": {"spec": pod}}
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "workers"},
        "spec": {"replicatedJobs": [{"name": "main", "template": {"spec": job}}]},
    }
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(jobset))
    cluster.kubectl("wait", "jobset/workers", "--for=condition=Completed", "--timeout=110s")
    nodes = cluster.kubectl("get", "pods", "-l", "jobset.sigs.k8s.io/jobset-name=workers", "-o", "wide")
    assert "tpu-0" in nodes
    assert "tpu-1" in nodes
    cluster.kubectl("delete", "jobset", "workers")


def test_helm_works_and_keeps_its_files_in_the_cluster_s_folder(cluster: Cluster) -> None:
    assert isinstance(json.loads(cluster.helm("list", "--all-namespaces", "-o", "json")), list)
    settings = cluster.helm("env")
    assert f'HELM_CACHE_HOME="{cluster.folder}/helm/cache"' in settings


def test_a_second_cluster_runs_beside_and_goes_without_a_trace(cluster: Cluster) -> None:
    before = machine()
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
    with pytest.raises(NoClusterError):
        lifecycle.stop("second")


@pytest.fixture
def starting() -> Iterator[subprocess.Popen[str]]:
    """`stepcluster up`, caught in the middle."""
    command = [sys.executable, "-m", "stepcluster", "up", "--name", "starting", "--tpu-nodes", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            while "API server ready" not in process.stderr.readline():
                assert process.poll() is None
            yield process
        finally:
            process.kill()
            if state.cluster_folder("starting").exists():
                lifecycle.stop("starting")


def test_ctrl_c_leaves_nothing_running(starting: subprocess.Popen[str], cluster: Cluster) -> None:
    record = state.read_file("starting")
    assert record is not None
    starting.send_signal(signal.SIGINT)
    assert starting.wait(200) == 130
    assert_nothing_left(record.layout())


def test_what_a_killed_start_left_is_cleaned_up(starting: subprocess.Popen[str], cluster: Cluster) -> None:
    starting.kill()
    starting.wait()
    layout = state.read("starting").layout()
    assert list(processes.marked(processes.CLUSTER_MARK, str(layout.folder)))
    lifecycle.stop("starting")
    assert_nothing_left(layout)


def test_a_crashed_cluster_is_replaced_by_the_next_start(cluster: Cluster) -> None:
    before = machine()
    crashed = lifecycle.start("crashed", n_tpu_nodes=0)
    os.kill(crashed.launcher.namespaces.pid, signal.SIGKILL)
    wait_until(lambda: not state.is_running("crashed"), "the crash", timeout_s=100)
    with cluster_up("crashed", n_tpu_nodes=0) as again:
        assert "system" in again.kubectl("get", "nodes")
        layout = state.read("crashed").layout()
    assert_nothing_left(layout)
    assert machine() == before


def test_the_state_is_found_by_name_alone(cluster: Cluster) -> None:
    attached = Cluster.attach(cluster.name)
    assert attached.kubeconfig == cluster.kubeconfig
    assert shutil.which("kubectl", path=attached.environment["PATH"])
    with pytest.raises(NoClusterError, match="no cluster 'nowhere' is running"):
        Cluster.attach("nowhere")
