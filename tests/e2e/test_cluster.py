"""A test cluster leaves its machine as it was, also where it crashed or its start was interrupted."""

import os
import signal
from pathlib import Path

import pytest

from stepcluster import cgroups, cleaning, lifecycle, processes, state
from stepcluster.api import Cluster, cluster_up
from stepcluster.errors import ClusterExistsError, NoClusterError
from stepcluster.layout import Layout, parse_routes
from stepcluster.machine import run
from stepcluster.shelljobs import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SETTINGS = ("kernel/panic", "kernel/panic_on_oops", "vm/overcommit_memory", "net/netfilter/nf_conntrack_max")


def run_pod(cluster: Cluster, name: str, script: str) -> str:
    """Run a pod with a shell until it has ended with success, and return its output."""
    image = cluster.load_shell_image()
    cluster.kubectl("run", name, f"--image={image}", "--restart=Never", "--command", "--", "sh", "-c", script)
    ended = ("--for=jsonpath={.status.phase}=Succeeded", "--timeout=200s")
    cluster.kubectl("wait", f"pod/{name}", *ended, timeout_s=210)
    printed = cluster.kubectl("logs", name)
    cluster.kubectl("delete", "pod", name, "--now")
    return printed


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
