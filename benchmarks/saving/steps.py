"""Measure training steps beside a save, and without one."""

import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.saving.cores import pin, tasks
from benchmarks.saving.states import new_state

from stepkeeper import CheckpointManager

__all__ = ["WAYS", "measure"]

WAYS: Final = (
    "pinned, 100 ms",
    "unpinned, 100 ms",
    "unpinned and nice, 100 ms",
    "unpinned, 10 ms",
    "pinned, 10 ms",
)
"""A core for the trainer and one for its companion; or all cores for both, the trainer with as many threads. Nice: the
companion, by ten."""


class Work:
    """Matrix products that take so long for a step."""

    def __init__(self, step_s: float) -> None:
        self._matrix = torch.rand(256, 256)
        self._n_products = 1
        self.step()
        while (took_s := min(self.step() for _ in range(5))) < step_s:
            self._n_products = max(self._n_products + 1, math.ceil(self._n_products * step_s / took_s))

    def step(self) -> float:
        began_s = time.perf_counter()
        product = self._matrix
        for _ in range(self._n_products):
            product = (product @ self._matrix).clamp_(max=1.0)
        return time.perf_counter() - began_s


def measure(way: str, shape: str, size_mib: int, folder: Path, *, n_steps: int) -> dict[str, Any]:
    """So many steps, half of them beside a save."""
    pinned, step_ms = way.startswith("pinned"), int(way.split()[-2])
    if pinned:
        pin(tasks(os.getpid()), 0)
        torch.set_num_threads(1)
    state = new_state(shape, size_mib)
    manager = CheckpointManager(str(folder / "root"), save=10**9, keep=1)
    work = Work(step_ms / 1000)
    for step in (1, 2):
        manager.save(step, state)
        manager.wait()
    companion = manager.health().companion_pid
    if pinned:
        pin(tasks(companion), 1)
    if "nice" in way:
        for task in tasks(companion):
            os.setpriority(os.PRIO_PROCESS, task, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    alone: list[float] = []
    beside: list[float] = []
    saves = 0
    while len(beside) + len(alone) < n_steps:
        saves += 1
        manager.save(2 + saves, state)
        n_before = len(beside)
        while manager.in_flight is not None:
            beside.append(work.step())
        alone += [work.step() for _ in range(max(1, len(beside) - n_before))]
    manager.wait()
    manager.close()
    return {
        "saves": saves,
        "steps_beside": len(beside),
        "steps_alone": len(alone),
        "mean_ratio": statistics.mean(beside) / statistics.mean(alone),
        "median_ratio": statistics.median(beside) / statistics.median(alone),
        "alone_ms": _figures_ms(alone),
        "beside_ms": _figures_ms(beside),
        "all_ms": _figures_ms([*alone, *beside]),
    }


def _figures_ms(times_s: Sequence[float]) -> dict[str, float]:
    in_order = sorted(times_s)
    return {
        "mean": statistics.mean(in_order) * 1000,
        "p50": in_order[len(in_order) // 2] * 1000,
        "p99": in_order[int(len(in_order) * 0.99)] * 1000,
        "p99.9": in_order[int(len(in_order) * 0.999)] * 1000,
        "most": in_order[-1] * 1000,
    }
