"""Draw random numbers on XLA devices; back at a saved step, the same ones come again. Usage: ROOT spmd|plain"""

import sys

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from stepkeeper import CheckpointManager, RandomState

root, spmd = sys.argv[1], sys.argv[2] == "spmd"
if spmd:
    xr.use_spmd()
w = torch.zeros(4, device="xla")
state = {"w": w, "random": RandomState()}


def train(manager: CheckpointManager, first: int, last: int) -> list[list[float]]:
    drawn = []
    for step in range(first, last + 1):
        w.add_(torch.nn.functional.dropout(torch.rand(4, device="xla"), 0.3))
        torch_xla.sync()
        drawn.append(w.cpu().tolist())
        manager.step(step, state)
    return drawn


def open_manager(root: str, interval: int) -> CheckpointManager:
    return CheckpointManager(root, interval, chkpt_on_preemption=False)


with open_manager(root, 3) as manager:
    first = train(manager, 1, 9)
    assert len({tuple(numbers) for numbers in first}) == 9
    manager.restore(6, state)
    xm.set_rng_state(987)
    manager.restore(6, state)
    assert train(manager, 7, 9) == first[6:]
    manager.wait()
    # Saves draw no numbers and move no generator.
    with open_manager(f"{root}-other", 10**6) as other:
        manager.restore(3, state)
        assert train(other, 4, 9) == first[3:]
