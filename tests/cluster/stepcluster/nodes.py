"""The nodes: what each is, its configuration files, starting and stopping it."""

import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from stepcluster import cgroups, nodeconfig, nodeimages, nodeinit
from stepcluster.binaries import Binaries
from stepcluster.errors import FaultError
from stepcluster.layout import METADATA_PORT, Layout
from stepcluster.machine import run, wait_until
from stepcluster.processes import NODE_MARK, Launcher, Namespaces, first_process, marked

TPU_TAINTS = (
    {"key": "google.com/tpu", "value": "present", "effect": "NoSchedule"},
    {"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"},
)
TPU_LABELS = {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-nodepool": "tpu-v5e-spot",
}
TPU_CHIPS = 4
TOPOLOGY_LABEL = "cloud.google.com/gke-tpu-topology"
SYSTEM_NODE = "system"
OFF_TIMEOUT_S = 60.0
"""Longest time until all that ran on a machine without power is gone, when this machine has other things to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    number: int
    """Place in the cluster: says which addresses its pods get and which ports its kubelet has."""
    tpu_chips: int = 0
    topology: str = ""
    """Of the slice that its chips are part of."""
    is_vm: bool = False
    """True if it came while the cluster ran, and joins by its startup script, which says its labels and taints."""

    @property
    def labels(self) -> dict[str, str]:
        if self.is_vm:
            return {}
        if self.tpu_chips:
            return TPU_LABELS | {TOPOLOGY_LABEL: self.topology}
        return {"cloud.google.com/gke-nodepool": "system"}

    @property
    def taints(self) -> Sequence[dict[str, str]]:
        return TPU_TAINTS if self.tpu_chips and not self.is_vm else ()


def vm_folder(layout: Layout, name: str) -> Path:
    return layout.node_folder(name) / "vm"


def choose_nodes(n_tpu: int, topology: str) -> tuple[Node, ...]:
    """Return the system node and `n_tpu` TPU nodes, of slices of this topology."""
    tpus = (Node(name=f"tpu-{i}", number=i + 1, tpu_chips=TPU_CHIPS, topology=topology) for i in range(n_tpu))
    return (Node(name=SYSTEM_NODE, number=0), *tpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRunner:
    """Starts, stops and looks into the nodes of one cluster."""

    launcher: Launcher
    binaries: Binaries
    layout: Layout
    torch_folder: str
    """Shown to pods, read-only, at one path on every node."""

    def start(self, node: Node) -> Path:
        """Start the node's first process, which brings up containerd and the kubelet, and return its log's path."""
        folder = self.layout.node_folder(node.name)
        folder.mkdir(parents=True, exist_ok=True)
        cgroups.create(self.layout.cgroup_name(node.name))
        nodeconfig.write(self.layout, node.name, node.number, node.taints)
        plan = nodeinit.NodePlan(
            folder=str(folder),
            kube=self.binaries["kube"],
            api_host=str(self.layout.address),
            kubelet_arguments=nodeconfig.kubelet_arguments(self.layout, node.name, node.labels),
            torch_folder=self.torch_folder,
            vm=self._vm_plan(node) if node.is_vm else None,
        )
        (folder / "plan.json").write_text(json.dumps(asdict(plan)), encoding="utf-8")
        argv = ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "--propagation", "private"]
        argv += ["--uts"] if node.is_vm else []
        argv += [sys.executable, "-m", "stepcluster.nodeinit", str(folder / "plan.json")]
        marks = {NODE_MARK: str(folder), "PYTHONPATH": str(Path(__file__).parents[1])}
        return self.launcher.start(f"node-{node.name}", argv, marks=marks)

    def _vm_plan(self, node: Node) -> nodeinit.VmPlan:
        return nodeinit.VmPlan(
            name=node.name,
            metadata_address=f"127.0.0.1:{METADATA_PORT + node.number}",
            folder=str(vm_folder(self.layout, node.name)),
            ca=str(self.layout.certificates / "ca.crt"),
        )

    def namespaces(self, node: str) -> Namespaces:
        """Return the node's namespaces.

        Raises:
            FaultError: The node is off.
        """
        pid = first_process(NODE_MARK, str(self.layout.node_folder(node)))
        if pid is None:
            raise FaultError(f"node {node} is off: `Cluster.faults.power_on` starts it")
        return Namespaces(pid=pid)

    def is_on(self, node: str) -> bool:
        return first_process(NODE_MARK, str(self.layout.node_folder(node))) is not None

    def tell(self, node: str, number: signal.Signals) -> None:
        """Send a signal to the first process of a node that may go off by itself meanwhile."""
        pid = first_process(NODE_MARK, str(self.layout.node_folder(node)))
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def power_off(self, node: str) -> None:
        """Kill every process of the node and its containers at once; what the node has stored stays."""
        os.kill(self.namespaces(node).pid, 9)
        self.wait_off(node, timeout_s=OFF_TIMEOUT_S)

    def wait_off(self, node: str, *, timeout_s: float) -> None:
        """Wait until no process of the node is left.

        Raises:
            StartError: Some are, after `timeout_s`.
        """
        folder = str(self.layout.node_folder(node))
        cgroup = self.layout.cgroup_name(node)
        wait_until(
            lambda: not any(marked(NODE_MARK, folder)) and not cgroups.processes(cgroup),
            f"the end of node {node}",
            timeout_s=timeout_s,
            poll_s=0.05,
        )
        cgroups.remove(cgroup)

    def wipe(self, node: str) -> None:
        """Make the node, which is off, as new; only the list of its images is kept."""
        folder = self.layout.node_folder(node)
        for name in ("containerd", "kubelet", "own", "pod-logs", "services"):
            shutil.rmtree(folder / name, ignore_errors=True)

    def import_image(self, node: str, archive: Path) -> None:
        """Import the image into the node's containerd, now and whenever the node is started anew."""
        folder = self.layout.node_folder(node)
        folder.mkdir(parents=True, exist_ok=True)
        nodeimages.remember(folder, archive)
        if self.is_on(node):
            inside = self.namespaces(node)
            nodeimages.import_missing(folder, lambda argv: run(inside.enter(argv)))
