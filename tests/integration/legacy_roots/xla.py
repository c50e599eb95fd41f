"""A training under torch_xla's own manager, and under ours from where that left off: python xla.py MODE ROOT.

MODE is save or resume. Says what it has in a line of JSON.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.distributed_checkpoint as xc
import torch_xla.runtime as xr
from torch import nn
from torch._C._distributed_c10d import HashStore

import stepkeeper


class Training:
    def __init__(self, seed: int, shape: tuple[int, int]) -> None:
        torch.manual_seed(seed)
        self.mesh = xs.Mesh(np.arange(4), shape, ("x", "y"))
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).to("xla")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        for parameter in self.model.parameters():
            self._sharded(parameter)
        stepkeeper.prime_optimizer(self.optimizer)
        for parameter in self.model.parameters():
            buffer = self.optimizer.state[parameter]["momentum_buffer"]
            if not torch_xla._XLAC._get_xla_sharding_spec(buffer):  # nowhere else
                self._sharded(buffer)
        torch_xla.sync()

    def _sharded(self, tensor: torch.Tensor) -> None:
        """Also what is replicated is said to be: what is left to the compiler, torch_xla's planners may lose."""
        spec = ("x", "y") if tensor.dim() == 2 else (None,)
        xs.mark_sharding(tensor, self.mesh, spec)

    def train(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self.optimizer.zero_grad()
            torch.autograd.backward(self.model(torch.ones(4, 8, device="xla")).square().sum() / 100)
            self.optimizer.step()
            torch_xla.sync()

    def bits(self) -> list[str]:
        parameters = list(self.model.parameters())
        tensors = [*parameters, *(self.optimizer.state[p]["momentum_buffer"] for p in parameters)]
        return [tensor.detach().cpu().numpy().tobytes().hex() for tensor in tensors]


def save(root: Path) -> dict[str, Any]:
    """Save as torch_xla's documentation shows it, on a mesh that its planners lose nothing of."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    training = Training(1, (4, 1))
    manager = xc.CheckpointManager(str(root), 2, chkpt_on_preemption=False)
    for step in range(1, 5):
        training.train(1)
        state = {
            "model": training.model.state_dict(),
            "optim": training.optimizer.state_dict(),
            "step": step,
        }
        manager.save_async(step, state)
    manager.join()
    return {"steps": manager.all_steps(), "bits": training.bits()}


def resume(root: Path) -> dict[str, Any]:
    training = Training(2, (2, 2))
    found: dict[str, Any] = {"model": training.model, "optim": training.optimizer, "step": 0}
    with stepkeeper.CheckpointManager(root.as_uri()) as manager:
        steps = manager.steps()
        result = manager.restore(found)
        assert result is not None
        said = {"steps": steps, "step": result.step, "value": found["step"], "bits": training.bits()}
        training.train(1)
        found["step"] = result.step + 1
        manager.save(result.step + 1, found).result()
        return said | {"after": training.bits(), "steps_after": manager.steps()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    xr.use_spmd()
    print(
        json.dumps({"save": save, "resume": resume}[sys.argv[1]](Path(sys.argv[2]))),
        flush=True,
    )
