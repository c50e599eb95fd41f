"""Faults by chance, the same ones for the same seed."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepcluster.faults import Faults
from stepcluster.machine import say


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One fault of a drill."""

    after_s: float
    kind: str
    node: str
    """The node that it is about; empty if it is about none."""


NODE_KINDS = ("spot-preemption", "power-cut", "drain")
OTHER_KINDS = ("kill-operator", "restart-api-server")


def plan(seed: int, nodes: Sequence[str], *, n_faults: int = 1, within_s: float = 60.0) -> list[Planned]:
    """Which faults come when; the same arguments give the same plan."""
    chance = random.Random(seed)
    times = sorted(round(chance.uniform(0, within_s), 1) for _ in range(n_faults))
    kinds = [chance.choice([*NODE_KINDS, *OTHER_KINDS]) for _ in range(n_faults)]
    return [
        Planned(after_s=after_s, kind=kind, node=chance.choice(nodes) if kind in NODE_KINDS else "")
        for after_s, kind in zip(times, kinds, strict=True)
    ]


def carry_out(faults: Faults, planned: Sequence[Planned], *, back_after_s: float) -> None:
    """Every fault of the plan has happened, and every node is back."""
    started = time.monotonic()
    actions: dict[str, Callable[[str], None]] = {
        "spot-preemption": lambda node: faults.spot_preemption(node, back_after_s=back_after_s),
        "power-cut": lambda node: _cut(faults, node, back_after_s),
        "drain": lambda node: _drain(faults, node, back_after_s),
        "kill-operator": lambda _: faults.kill_operator(),
        "restart-api-server": lambda _: faults.restart_api_server(),
    }
    for fault in planned:
        time.sleep(max(0.0, started + fault.after_s - time.monotonic()))
        say(f"drill: {time.monotonic() - started:.1f} s: {fault.kind} {fault.node}".rstrip())
        actions[fault.kind](fault.node)


def _cut(faults: Faults, node: str, back_after_s: float) -> None:
    faults.power_cut(node)
    time.sleep(back_after_s)
    faults.power_on(node)


def _drain(faults: Faults, node: str, back_after_s: float) -> None:
    faults.drain(node)
    time.sleep(back_after_s)
    faults.uncordon(node)
