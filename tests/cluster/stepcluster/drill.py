"""Faults by chance, the same ones for the same seed."""

import json
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepcluster.errors import FaultError
from stepcluster.faults import Faults
from stepcluster.machine import run, say

NODE_KINDS = ("spot-preemption", "power-cut", "drain")
CLUSTER_KINDS = ("kill-operator", "restart-api-server")
POD_KINDS = ("kill", "stop", "oom", "evict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One fault of a drill."""

    after_s: float
    kind: str
    node: str = ""
    """For a fault of a node."""
    pod_millis: int = 0
    """For a fault of a pod: which, as a place in the list of those that run by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods that a drill may hit."""

    namespace: str
    selector: str


def plan(
    seed: int, nodes: Sequence[str], *, n_faults: int = 1, within_s: float = 60.0, with_pods: bool = False
) -> list[Planned]:
    """Plan which faults come when. The same arguments give the same plan."""
    chance = random.Random(seed)
    kinds = [*NODE_KINDS, *CLUSTER_KINDS, *(POD_KINDS if with_pods else ())]
    times = sorted(round(chance.uniform(0, within_s), 1) for _ in range(n_faults))
    return [_one(chance, after_s, chance.choice(kinds), nodes) for after_s in times]


def _one(chance: random.Random, after_s: float, kind: str, nodes: Sequence[str]) -> Planned:
    if kind in NODE_KINDS:
        return Planned(after_s=after_s, kind=kind, node=chance.choice(nodes))
    return Planned(after_s=after_s, kind=kind, pod_millis=chance.randrange(1000) if kind in POD_KINDS else 0)


def carry_out(
    faults: Faults, planned: Sequence[Planned], *, back_after_s: float, pods: Pods | None = None
) -> None:
    """Bring about every fault of the plan, then bring back every node and let every stopped pod go on.

    Raises:
        FaultError: A fault's target was not there when its time came.
    """
    started = time.monotonic()
    for fault in planned:
        time.sleep(max(0.0, started + fault.after_s - time.monotonic()))
        target = fault.node
        if fault.kind in POD_KINDS:
            target = _choose_pod(faults, pods, fault.pod_millis)
        say(f"drill: {time.monotonic() - started:.1f} s: {fault.kind} {target}".rstrip())
        _actions(faults, back_after_s, pods.namespace if pods else "default")[fault.kind](target)


def _actions(faults: Faults, back_after_s: float, namespace: str) -> dict[str, Callable[[str], object]]:
    def cut(node: str) -> None:
        faults.power_cut(node)
        time.sleep(back_after_s)
        faults.power_on(node)

    def drain(node: str) -> None:
        faults.drain(node)
        time.sleep(back_after_s)
        faults.uncordon(node)

    def stop(pod: str) -> None:
        faults.signal_pod(pod, signal.SIGSTOP, namespace=namespace)
        time.sleep(back_after_s)
        faults.signal_pod(pod, signal.SIGCONT, namespace=namespace)

    return {
        "spot-preemption": lambda node: faults.spot_preemption(node, back_after_s=back_after_s),
        "power-cut": cut,
        "drain": drain,
        "kill-operator": lambda _: faults.kill_operator(),
        "restart-api-server": lambda _: faults.restart_api_server(),
        "kill": lambda pod: faults.signal_pod(pod, namespace=namespace),
        "stop": stop,
        "oom": lambda pod: faults.out_of_memory(pod, namespace=namespace),
        "evict": lambda pod: faults.evict(pod, namespace=namespace),
    }


def _choose_pod(faults: Faults, pods: Pods | None, millis: int) -> str:
    if pods is None:
        raise FaultError("a drill with faults of pods needs to be told which pods: --selector")
    options = ["--selector", pods.selector, "--field-selector=status.phase=Running", "-o", "json"]
    listed = run([*faults.parts.kubectl, "-n", pods.namespace, "get", "pods", *options])
    names = sorted(item["metadata"]["name"] for item in json.loads(listed)["items"])
    if not names:
        raise FaultError(f"no pod that {pods.selector} selects runs in namespace {pods.namespace}")
    return str(names[millis * len(names) // 1000])
