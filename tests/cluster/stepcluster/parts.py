"""A running cluster put together from its record: what every command and fault works with."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stepcluster import binaries, processes, state
from stepcluster.binaries import Binaries
from stepcluster.errors import BuildError, CommandError, NoClusterError
from stepcluster.layout import Layout
from stepcluster.machine import run, wait_until
from stepcluster.nodes import Node, NodeRunner
from stepcluster.processes import CLUSTER_MARK, Launcher, Namespaces
from stepcluster.vms import records

CRD_TIMEOUT_S = 120.0
NODE_TIMEOUT_S = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The record of a cluster with what works on it."""

    record: state.Record
    binaries: Binaries
    launcher: Launcher
    runner: NodeRunner

    @classmethod
    def of(cls, record: state.Record, programs: Binaries) -> "Parts":
        layout = record.layout()
        pid = processes.first_process(CLUSTER_MARK, str(layout.folder))
        if pid is None:
            raise NoClusterError(f"cluster {record.name!r} has ended")
        launcher = Launcher(namespaces=Namespaces(pid=pid), folder=layout.folder)
        runner = NodeRunner(
            launcher=launcher, binaries=programs, layout=layout, torch_folder=record.torch_folder
        )
        return cls(record=record, binaries=programs, launcher=launcher, runner=runner)

    @classmethod
    def attach(cls, name: str) -> "Parts":
        """Return the parts of the running cluster of this name.

        Raises:
            NoClusterError: None is running.
            BuildError: Its programs are no longer in the cache.
        """
        record = state.read(name)
        programs = binaries.find()
        if programs is None:
            raise BuildError(
                "the cluster's programs have changed: run `python -m stepcluster build`, then down and up"
            )
        return cls.of(record, programs)

    @property
    def layout(self) -> Layout:
        return self.record.layout()

    @property
    def kubectl(self) -> list[str]:
        cache = self.layout.folder / "kubectl-cache"
        return [self.binaries["kubectl"], f"--kubeconfig={self.layout.kubeconfig}", f"--cache-dir={cache}"]

    def apply(self, manifests: Iterable[Mapping[str, object]]) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)})
        run([*self.kubectl, "apply", "--server-side", "-f", "-"], stdin=text)

    def node(self, name: str) -> Node:
        fixed = next((node for node in self.record.nodes if node.name == name), None)
        found = fixed or records.read(self.layout, name)
        if found is None:
            known = ", ".join(node.name for node in self.record.nodes)
            raise NoClusterError(f"cluster {self.record.name!r} has no node {name!r}; it has {known}")
        return found

    def wait_ready(self, node: Node, *, log: Path | None = None) -> None:
        log = log or self.layout.node_folder(node.name) / "kubelet.log"
        wait_until(lambda: self._is_ready(node.name), f"node {node.name}", timeout_s=NODE_TIMEOUT_S, log=log)
        if node.tpu_chips:
            chips = {"google.com/tpu": str(node.tpu_chips)}
            patch = json.dumps({"status": {"capacity": chips, "allocatable": chips}})
            options = ["--subresource=status", "--type=merge", "-p", patch]
            run([*self.kubectl, "patch", "node", node.name, *options])

    def wait_established(self, crd: str) -> None:
        """Objects of that CRD can be made. Raises StartError if that takes longer than two minutes."""
        wait_until(lambda: self._is_established(crd), f"CRD {crd}", timeout_s=CRD_TIMEOUT_S)

    def _is_established(self, crd: str) -> bool:
        found = json.loads(run([*self.kubectl, "get", "crd", crd, "-o", "json"]))
        # Null, not absent, in the moment after the CRD was created: kubectl's own wait and jsonpath fail on that.
        conditions = found.get("status", {}).get("conditions") or ()
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    def _is_ready(self, node: str) -> bool:
        condition = '{.status.conditions[?(@.type=="Ready")].status}'
        try:
            return run([*self.kubectl, "get", "node", node, "-o", f"jsonpath={condition}"]) == "True"
        except CommandError:
            # It has not registered yet.
            return False
