"""Ways to save tensors that torch_xla shards over four devices, while the training continues."""

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from benchmarks.saving.cores import cpu_s_of, pin, tasks
from benchmarks.saving.memory import forget_peak, peak_bytes, resident_bytes
from benchmarks.saving.states import new_state

from stepkeeper import CheckpointManager, Options, SaveReport
from stepkeeper_planners import adapters

__all__ = ["measure"]

_MATMULS: Final = 2
_WARM_STEPS: Final = 3
_MOST_WARM_STEPS: Final = 40
_EVEN: Final = 1.3
"""The slowest of some steps, in the fastest: they have all their memory, which a machine may take long to give."""


@dataclass(kw_only=True)
class Times:
    """Times, in seconds, of one training: by turns without a save, and beside one until that is done."""

    alone_s: list[float] = field(default_factory=list)
    """Time of each step without a save."""

    stall_s: list[float] = field(default_factory=list)
    """Time that each call of a save took."""

    beside_s: list[float] = field(default_factory=list)
    """Time of each step while a save is in flight."""

    extra_s: list[float] = field(default_factory=list)
    """Time that each save's steps and call took beyond as many steps just before."""

    extra_cpu_s: list[float] = field(default_factory=list)
    """The same of all cores, in this process."""


class Training:
    """Changes every tensor of the state in place, in steps of about the same time."""

    def __init__(self, shape: str, size_mib: int) -> None:
        xr.use_spmd()
        mesh = xs.Mesh(np.arange(4), (4,), ("x",))
        self.state = {name: tensor.to("xla") for name, tensor in new_state(shape, size_mib).items()}
        for tensor in self.state.values():
            xs.mark_sharding(tensor, mesh, ("x", None))
        self.work = torch.ones(512, 512).to("xla")
        self.times = Times()
        self._warm_up()

    def _warm_up(self) -> None:
        took_s: list[float] = []
        while len(took_s) < _MOST_WARM_STEPS:
            began_s = time.perf_counter()
            self.step()
            xm.wait_device_ops()
            took_s.append(time.perf_counter() - began_s)
            last = took_s[-_WARM_STEPS:]
            if len(last) == _WARM_STEPS and max(last) <= _EVEN * min(took_s):
                break

    def step(self) -> None:
        for _ in range(_MATMULS):
            self.work = (self.work @ self.work) * 1e-4
        for tensor in self.state.values():
            tensor.add_(1)
        torch_xla.sync()

    def steps_alone(self, n_steps: int) -> tuple[float, float]:
        """Measure a step while nothing is saved, the devices' work included: wall and CPU seconds."""
        xm.wait_device_ops()
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(n_steps):
            step_began_s = time.perf_counter()
            self.step()
            self.times.alone_s.append(time.perf_counter() - step_began_s)
        xm.wait_device_ops()
        return (time.perf_counter() - began_s) / n_steps, (time.process_time() - cpu_s) / n_steps

    def save(self, manager: Any, step: int, least: int, alone: tuple[float, float]) -> None:
        """Save, and train until the save is done, for `least` steps at least."""
        began_s, cpu_s = time.perf_counter(), time.process_time()
        self.step()
        stepped_s = time.perf_counter()
        save = manager.save if isinstance(manager, CheckpointManager) else manager.save_async
        if not save(step, self.state):
            raise RuntimeError(f"step {step} was not saved")
        self.times.stall_s.append(time.perf_counter() - stepped_s)
        n_steps, going_on = 1, True
        while n_steps < least or going_on:
            step_began_s = time.perf_counter()
            self.step()
            if going_on:
                self.times.beside_s.append(time.perf_counter() - step_began_s)
                going_on = not _is_done(manager)
            n_steps += 1
        xm.wait_device_ops()
        self.times.extra_s.append(time.perf_counter() - began_s - n_steps * alone[0])
        self.times.extra_cpu_s.append(time.process_time() - cpu_s - n_steps * alone[1])


def measure(way: str, shape: str, size_mib: int, folder: Path, *, saves: int, every: int) -> dict[str, Any]:
    """So many saves, so many steps or more apart; first save and compilation included."""
    before = tasks(os.getpid())
    training = Training(shape, size_mib)
    if "shared" not in way:
        pin(tasks(os.getpid()) - before, 0)
        pin(before, 1)
    total_bytes = sum(tensor.numel() * tensor.itemsize for tensor in training.state.values())
    copy_s = _device_copy_s(training)
    manager = _manager(way, folder, total_bytes)
    reports: list[SaveReport] = []
    if isinstance(manager, CheckpointManager):
        manager.on_save(reports.append)
    forget_peak()
    before_bytes = resident_bytes()
    for step in range(1, saves + 1):
        training.save(manager, step, every, training.steps_alone(every))
    if isinstance(manager, CheckpointManager):
        manager.wait()
    else:
        manager.join()
    peak = peak_bytes() - before_bytes
    helper_s = None
    if isinstance(manager, CheckpointManager):
        helper_s = cpu_s_of(manager.health().companion_pid) / saves
        manager.close()
    times = training.times
    return {
        "wall_per_save_s": statistics.mean(times.extra_s),
        "extra_s": times.extra_s,
        "extra_cpu_s": times.extra_cpu_s,
        "companion_cpu_per_save_s": helper_s,
        "transfer_s": [report.transfer_s for report in reports],
        "persist_s": [report.persist_s for report in reports],
        "stall_s": times.stall_s,
        "device_copy_s": copy_s,
        "step_alone_s": statistics.mean(times.alone_s),
        "step_beside_s": statistics.mean(times.beside_s) if times.beside_s else None,
        "worst_step_beside_s": max(times.beside_s, default=None),
        "peak_extra_bytes": peak,
    }


def _is_done(manager: Any) -> bool:
    if isinstance(manager, CheckpointManager):
        return manager.in_flight is None
    return all(future.done() for future in manager._async_futures)  # noqa: SLF001 — theirs has no other sign


def _device_copy_s(training: Training) -> float:
    """Measure a copy of all tensors on their devices, compiled before."""
    times_s = []
    for _ in range(3):
        clones = [tensor.detach().clone() for tensor in training.state.values()]
        began_s = time.perf_counter()
        adapters.start_pending(clones)
        xm.wait_device_ops()
        times_s.append(time.perf_counter() - began_s)
        del clones
    return min(times_s[1:])


def _manager(way: str, folder: Path, total_bytes: int) -> Any:
    if way.startswith("torch_xla's"):
        from torch_xla.experimental.distributed_checkpoint import CheckpointManager as Theirs

        store = dist.FileStore(str(folder / "meet"), 1)  # type: ignore[attr-defined]  # torch does not list it
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return Theirs(str(folder / "root"), 1, max_to_keep=1, chkpt_on_preemption=False)
    budgets = {"stepkeeper, 50 %": total_bytes // 2, "stepkeeper, 0 %": 0}
    return CheckpointManager(
        str(folder / "root"), save=1, keep=1, options=Options(device_budget_bytes=budgets.get(way))
    )
