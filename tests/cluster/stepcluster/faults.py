"""Bring about, on this cluster, the faults of real ones."""

import json
import os
import signal
import time
from dataclasses import dataclass

from stepcluster import containers
from stepcluster.errors import FaultError
from stepcluster.machine import run
from stepcluster.nodeconfig import SHUTDOWN_S
from stepcluster.parts import Parts

OPERATOR_SELECTOR = "app.kubernetes.io/name=stepkeeper,app.kubernetes.io/component=operator"
POWER_OFF_MARGIN_S = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of one cluster. Each method returns when the fault has happened, not when its consequences have."""

    parts: Parts

    def spot_preemption(
        self, node: str, *, back_after_s: float | None = None, delete_node: bool = True
    ) -> None:
        """Take the node back as a cloud does: notify its pods, wait 15 s, switch it off, remove it from the API server.

        If `back_after_s` is given, a new machine of the same name is Ready that many seconds later.
        """
        known = self.parts.node(node)
        os.kill(self.parts.runner.namespaces(node).pid, signal.SIGUSR1)
        self.parts.runner.wait_off(node, timeout_s=SHUTDOWN_S + POWER_OFF_MARGIN_S)
        if delete_node:
            # A cloud's node controller does that when the machine no longer exists.
            self._kubectl("delete", "node", node, "--ignore-not-found")
        if back_after_s is not None:
            time.sleep(back_after_s)
            self.power_on(known.name, fresh=True)

    def power_cut(self, node: str) -> None:
        self.parts.runner.power_off(self.parts.node(node).name)

    def power_on(self, node: str, *, fresh: bool = False) -> None:
        """Switch the node on and wait until it is Ready: with its disk as it was or, if `fresh`, as a new machine."""
        known = self.parts.node(node)
        runner = self.parts.runner
        if runner.is_on(node):
            raise FaultError(f"node {node} is on already")
        if fresh:
            runner.wipe(node)
            self._kubectl("delete", "node", node, "--ignore-not-found")
        runner.start(known)
        self.parts.wait_ready(known)

    def power_on_all(self) -> None:
        """Make every node Ready: one that was off comes back as a new machine."""
        for name in (node.name for node in self.parts.record.nodes):
            if not self.parts.runner.is_on(name):
                self.power_on(name, fresh=True)

    def kill_operator(self) -> None:
        """Kill the operator's process; its kubelet starts another."""
        options = ["--selector", OPERATOR_SELECTOR, "--field-selector=status.phase=Running", "-o", "json"]
        pods = json.loads(self._kubectl("get", "pods", "--all-namespaces", *options))["items"]
        if not pods:
            raise FaultError(f"no operator runs: no pod is labelled {OPERATOR_SELECTOR}")
        for pod in pods:
            containers.send(containers.locate(self.parts, pod, ""), signal.SIGKILL)

    def stop_operator(self) -> None:
        """Stop the operator until `start_operator`."""
        namespace, deployment = self._operator()
        self._kubectl("-n", namespace, "scale", deployment, "--replicas=0")
        self._kubectl(
            "-n", namespace, "wait", "pod", "-l", OPERATOR_SELECTOR, "--for=delete", "--timeout=110s"
        )

    def start_operator(self) -> None:
        """Start the stopped operator again and wait until it is available."""
        namespace, deployment = self._operator()
        self._kubectl("-n", namespace, "scale", deployment, "--replicas=1")
        self._kubectl("-n", namespace, "wait", deployment, "--for=condition=Available", "--timeout=110s")

    def _operator(self) -> tuple[str, str]:
        """Return namespace and name of the operator's Deployment."""
        found = self._kubectl("get", "deployments", "--all-namespaces", "-l", OPERATOR_SELECTOR, "-o", "json")
        items = json.loads(found)["items"]
        if len(items) != 1:
            raise FaultError(
                f"{len(items)} Deployments are labelled {OPERATOR_SELECTOR}: install the chart, once"
            )
        return items[0]["metadata"]["namespace"], f"deployment/{items[0]['metadata']['name']}"

    def _kubectl(self, *arguments: str) -> str:
        return run([*self.parts.kubectl, *arguments], timeout_s=120.0)
