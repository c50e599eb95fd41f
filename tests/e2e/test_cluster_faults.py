"""The faults are what a real cluster's are: what the operator and the pods see of them is checked here."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from stepcluster.api import Cluster
from stepcluster.controlplane import NODE_MONITOR_GRACE_S, UNREACHABLE_TOLERATION_S
from stepcluster.errors import CommandError, FaultError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SAVES = "trap 'echo saving; sleep 2; echo saved > /dev/termination-log; exit 75' TERM; while :; do sleep 0.1; done"
IGNORES = "trap 'echo no' TERM; while :; do sleep 0.1; done"
COUNTS = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done"


class Pods:
    """Pods for one test, on one node."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._image = cluster.load_shell_image()
        self._names: list[str] = []

    def run(self, name: str, script: str, node: str, *, grace_s: int = 30) -> None:
        container = {"name": "main", "image": self._image, "command": ["sh", "-c", script]}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": node},
                "tolerations": [
                    {"key": "google.com/tpu", "operator": "Exists"},
                    {"key": "cloud.google.com/gke-spot", "operator": "Exists"},
                ],
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": grace_s,
                "containers": [container],
            },
        }
        self._cluster.kubectl("create", "-f", "-", stdin=json.dumps(pod))
        self._names.append(name)
        self._cluster.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=200s", timeout_s=210)

    def get(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._cluster.kubectl("get", "pod", name, "-o", "json"))
        return found

    def ended(self, name: str) -> dict[str, Any]:
        """Return how the pod's container ended."""
        until(lambda: "terminated" in self.get(name)["status"]["containerStatuses"][0]["state"])
        state: dict[str, Any] = self.get(name)["status"]["containerStatuses"][0]["state"]["terminated"]
        return state

    def disruption(self, name: str) -> str:
        """The reason of the pod's disruption, empty if it has none."""
        conditions = self.get(name)["status"]["conditions"]
        return next((str(item["reason"]) for item in conditions if item["type"] == "DisruptionTarget"), "")

    def delete(self) -> None:
        for name in self._names:
            self._cluster.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--ignore-not-found")


@pytest.fixture
def pods(cluster: Cluster) -> Iterator[Pods]:
    made = Pods(cluster)
    yield made
    made.delete()


def until(is_true: Callable[[], bool], timeout_s: float = 100, *, seen: Callable[[], Any] = str) -> float:
    """Seconds until it was true. What was `seen` instead is told where it isn't in time."""
    started = time.monotonic()
    while not is_true():
        assert time.monotonic() < started + timeout_s, seen()
        time.sleep(0.2)
    return time.monotonic() - started


def node_ready(cluster: Cluster, node: str) -> str:
    """The status of the node's condition Ready; empty if there is no such node."""
    try:
        conditions = json.loads(cluster.kubectl("get", "node", node, "-o", "json"))["status"]["conditions"]
    except CommandError:
        return ""
    return next(str(item["status"]) for item in conditions if item["type"] == "Ready")


def test_a_spot_preemption_tells_the_pods_waits_15_s_and_takes_the_machine(
    cluster: Cluster, pods: Pods
) -> None:
    pods.run("saves", SAVES, "tpu-1", grace_s=120)
    pods.run("ignores", IGNORES, "tpu-1", grace_s=120)
    started, began_s = time.monotonic(), time.time()
    cluster.faults.spot_preemption("tpu-1")
    assert time.monotonic() - started > 14
    saved, ignored = pods.ended("saves"), pods.ended("ignores")
    assert node_ready(cluster, "tpu-1") == ""
    # Until the machine is off and its node deleted takes longer, on a busy machine much.
    assert 14 < datetime.fromisoformat(ignored["finishedAt"]).timestamp() - began_s < 30
    assert (saved["exitCode"], saved["message"].strip()) == (75, "saved")
    assert ignored["exitCode"] == 137
    for name in ("saves", "ignores"):
        assert pods.disruption(name) == "TerminationByKubelet"
        assert pods.get(name)["status"]["phase"] == "Failed"
    cluster.faults.power_on("tpu-1", fresh=True)
    assert node_ready(cluster, "tpu-1") == "True"
    pods.run("anew", COUNTS, "tpu-1")


def test_a_power_cut_is_seen_after_the_grace_and_the_node_comes_back(cluster: Cluster, pods: Pods) -> None:
    pods.run("lost", COUNTS, "tpu-0")
    cluster.faults.power_cut("tpu-0")
    with pytest.raises(FaultError, match="tpu-0 is off"):
        cluster.faults.power_cut("tpu-0")
    # Kubernetes' own grace is 50 s, and its own toleration 300.
    assert until(lambda: node_ready(cluster, "tpu-0") == "Unknown", 100) < 2 * NODE_MONITOR_GRACE_S
    until(
        lambda: pods.disruption("lost") == "DeletionByTaintManager",
        UNREACHABLE_TOLERATION_S + 60,
        seen=lambda: pods.get("lost")["status"],
    )
    lost = pods.get("lost")
    assert lost["status"]["phase"] == "Running"
    assert "deletionTimestamp" in lost["metadata"]
    assert node_ready(cluster, "tpu-1") == "True"
    cluster.faults.power_on("tpu-0")
    assert node_ready(cluster, "tpu-0") == "True"
    pods.run("after", COUNTS, "tpu-0")


def test_signals_reach_one_process_of_a_pod(cluster: Cluster, pods: Pods) -> None:
    pods.run("counts", COUNTS, "tpu-0")
    cluster.faults.signal_pod("counts", signal.SIGSTOP)

    def stands_still() -> bool:
        """What it has said before may yet be on its way into the log."""
        before = cluster.kubectl("logs", "counts")
        time.sleep(1)
        return cluster.kubectl("logs", "counts") == before

    until(stands_still)
    stopped_at = cluster.kubectl("logs", "counts")
    time.sleep(0.7)
    assert cluster.kubectl("logs", "counts") == stopped_at
    cluster.faults.signal_pod("counts", signal.SIGCONT)
    until(lambda: cluster.kubectl("logs", "counts") != stopped_at)
    cluster.faults.signal_pod("counts", signal.SIGKILL)
    assert pods.ended("counts")["exitCode"] == 137
    with pytest.raises(FaultError, match="no running container"):
        cluster.faults.signal_pod("counts")


def test_a_pod_without_memory_is_killed_by_the_kernel(cluster: Cluster, pods: Pods) -> None:
    pods.run("eats", "exec sleep 600", "tpu-0")
    cluster.faults.out_of_memory("eats")
    ended = pods.ended("eats")
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def test_evicted_and_drained_pods_say_so(cluster: Cluster, pods: Pods) -> None:
    # One that ends would be gone a moment later, and what it says with it.
    pods.run("evicted", IGNORES, "tpu-0", grace_s=120)
    cluster.faults.evict("evicted")
    assert pods.disruption("evicted") == "EvictionByEvictionAPI"
    pods.delete()
    pods.run("drained", SAVES, "tpu-0")
    cluster.faults.drain("tpu-0")
    with pytest.raises(CommandError, match="not found"):
        pods.get("drained")
    cluster.faults.uncordon("tpu-0")
    pods.run("welcome", COUNTS, "tpu-0")


def test_pods_live_through_a_restart_of_the_api_server(cluster: Cluster, pods: Pods) -> None:
    pods.run("lives", COUNTS, "tpu-0")
    uid = pods.get("lives")["metadata"]["uid"]
    cluster.faults.restart_api_server()
    assert pods.get("lives")["metadata"]["uid"] == uid
    assert pods.get("lives")["status"]["phase"] == "Running"
    pods.run("still", COUNTS, "tpu-1")


def test_an_operator_is_killed_kept_away_and_brought_back(operator: Cluster) -> None:
    operator.faults.stop_operator()
    with pytest.raises(FaultError, match="no operator runs"):
        operator.faults.kill_operator()
    operator.faults.start_operator()
    operator.faults.kill_operator()
    restarts = "{.items[*].status.containerStatuses[0].restartCount}"
    ask = ("get", "pods", "-A", "-l", "app.kubernetes.io/component=operator", "-o", f"jsonpath={restarts}")
    # One that waits for the Lease of the killed one may be started once more.
    until(lambda: operator.kubectl(*ask) not in {"", "0"}, seen=lambda: operator.kubectl("get", "pods", "-A"))


def test_a_node_that_is_on_is_not_started_again(cluster: Cluster) -> None:
    with pytest.raises(FaultError, match="is on already"):
        cluster.faults.power_on("tpu-0")
