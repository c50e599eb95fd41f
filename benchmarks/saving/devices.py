"""Ways to save tensors that torch_xla shards over four devices, from a training that goes on."""

import statistics
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from benchmarks.saving.memory import forget_peak, peak_bytes, resident_bytes
from benchmarks.saving.states import new_state

from stepkeeper import CheckpointManager
from stepkeeper_planners import adapters

__all__ = ["WAYS", "measure"]

WAYS: Final = ("stepkeeper, 100 %", "stepkeeper, 50 %", "stepkeeper, 0 %", "torch_xla's manager")
_MATMULS: Final = 2


class Training:
    """Changes every tensor of the state in place, in steps of about the same time."""

    def __init__(self, shape: str, size_mib: int) -> None:
        xr.use_spmd()
        mesh = xs.Mesh(np.arange(4), (4,), ("x",))
        self.state = {name: tensor.to("xla") for name, tensor in new_state(shape, size_mib).items()}
        for tensor in self.state.values():
            xs.mark_sharding(tensor, mesh, ("x", None))
        self.work = torch.ones(512, 512).to("xla")
        torch_xla.sync()
        xm.wait_device_ops()

    def step(self) -> None:
        for _ in range(_MATMULS):
            self.work = (self.work @ self.work) * 1e-4
        for tensor in self.state.values():
            tensor.add_(1)
        torch_xla.sync()

    def run(self, manager: Any, steps: int) -> tuple[float, list[float], list[float], list[float]]:
        """Seconds of all, of each save call, and of the steps without and with a save behind them."""
        stalls: list[float] = []
        alone: list[float] = []
        beside: list[float] = []
        xm.wait_device_ops()
        began_s = time.perf_counter()
        for step in range(1, steps + 1):
            step_began_s = time.perf_counter()
            saving = getattr(manager, "in_flight", None) is not None
            self.step()
            if manager is not None:
                stepped_s = time.perf_counter()
                if manager.save_async(step, self.state):
                    stalls.append(time.perf_counter() - stepped_s)
                    continue
            (beside if saving else alone).append(time.perf_counter() - step_began_s)
        xm.wait_device_ops()
        return time.perf_counter() - began_s, stalls, alone, beside


def measure(way: str, shape: str, size_mib: int, folder: Path, *, steps: int, every: int) -> dict[str, Any]:
    """The same steps without and with saves, first save and compilation included."""
    training = Training(shape, size_mib)
    total_bytes = sum(tensor.numel() * tensor.itemsize for tensor in training.state.values())
    for _ in range(3):
        training.step()
    without_s, _, _, _ = training.run(None, steps)
    copy_s = _device_copy_s(training)
    manager = _manager(way, folder, every, total_bytes)
    forget_peak()
    before_bytes = resident_bytes()
    with_s, stalls, alone, beside = training.run(manager, steps)
    manager.join()
    peak = peak_bytes() - before_bytes
    if isinstance(manager, CheckpointManager):
        manager.close()
    return {
        "wall_per_save_s": (with_s - without_s) / len(stalls),
        "stall_s": stalls,
        "device_copy_s": copy_s,
        "step_alone_s": statistics.mean(alone) if alone else None,
        "step_beside_s": statistics.mean(beside) if beside else None,
        "worst_step_beside_s": max(beside, default=None),
        "without_s": without_s,
        "with_s": with_s,
        "steps": steps,
        "peak_extra_bytes": peak,
    }


def _device_copy_s(training: Training) -> float:
    """A copy of all tensors on their devices, compiled before."""
    times_s = []
    for _ in range(3):
        clones = [tensor.detach().clone() for tensor in training.state.values()]
        began_s = time.perf_counter()
        adapters.start(clones)
        xm.wait_device_ops()
        times_s.append(time.perf_counter() - began_s)
        del clones
    return min(times_s[1:])


def _manager(way: str, folder: Path, every: int, total_bytes: int) -> Any:
    if way == "torch_xla's manager":
        from torch_xla.experimental.distributed_checkpoint import CheckpointManager as Theirs

        store = dist.FileStore(str(folder / "meet"), 1)  # type: ignore[attr-defined]  # torch does not list it
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return Theirs(str(folder / "root"), every, max_to_keep=1, chkpt_on_preemption=False)
    budgets = {"stepkeeper, 100 %": None, "stepkeeper, 50 %": total_bytes // 2, "stepkeeper, 0 %": 0}
    return CheckpointManager(str(folder / "root"), every, max_to_keep=1, device_budget_bytes=budgets[way])
