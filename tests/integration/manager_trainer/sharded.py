"""Tensors that torch_xla shards: python sharded.py save|restore URI. Says what it found in a line of JSON."""

import json
import sys
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

from stepkeeper import CheckpointManager


class Training:
    def __init__(self) -> None:
        torch.manual_seed(1)
        xm.set_rng_state(11)
        mesh = xs.Mesh(np.arange(4), (2, 2), ("x", "y"))
        self.model = nn.Linear(33, 18).to("xla")
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1, capturable=True)
        for parameter in self.parameters:
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device="xla"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        state = self.optimizer.state[self.model.weight]
        for tensor, spec in (
            (self.model.weight, ("x", "y")),
            (state["exp_avg"], ("x", None)),
            (state["exp_avg_sq"], (None, "y")),
        ):
            xs.mark_sharding(tensor, mesh, spec)
        torch_xla.sync()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "rng": Seed()}

    def step(self) -> None:
        noise = torch.rand(8, 33, device="xla")
        self.optimizer.zero_grad()
        torch.autograd.backward((self.model(noise) ** 2).sum())
        self.optimizer.step()
        torch_xla.sync()

    def bits(self) -> list[str]:
        tensors = [self.model.weight, self.model.bias]
        tensors += [
            self.optimizer.state[p][name] for p in self.parameters for name in ("exp_avg", "exp_avg_sq")
        ]
        return [tensor.detach().cpu().numpy().tobytes().hex() for tensor in tensors]


class Seed:
    def state_dict(self) -> dict[str, int]:
        return {"seed": xm.get_rng_state()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        xm.set_rng_state(state["seed"])


def compilations() -> int:
    data = met.metric_data("CompileTime")
    return 0 if data is None else int(data[0])


def save(uri: str) -> dict[str, Any]:
    undisturbed = Training()
    for _ in range(6):
        undisturbed.step()
    training = Training()
    compiled = 0
    with CheckpointManager(uri, 10**6) as manager:
        for step in range(1, 7):
            training.step()
            if step == 4:
                compiled = compilations()
            # The second save finds all that it needs compiled.
            manager.save_async(step, training.state, force=step in (3, 4, 5))
        torch_xla.sync()
        xm.wait_device_ops()
        later = compilations() - compiled
    return {
        "same": training.bits() == undisturbed.bits(),
        "bits": training.bits(),
        "later_compilations": later,
    }


def restore(uri: str) -> dict[str, Any]:
    training = Training()
    for parameter in training.parameters:
        with torch.no_grad():
            parameter.zero_()
    torch_xla.sync()
    with CheckpointManager(uri, 10**6) as manager:
        result = manager.restore_latest(training.state)
        assert result is not None
        specs = [torch_xla._XLAC._get_xla_sharding_spec(t) for t in training.parameters]  # nowhere else
        for _ in range(result.step, 6):
            training.step()
        bits = training.bits()
        assert manager.save(7, training.state, force=True)
    return {"step": result.step, "bits": bits, "specs": specs}


xr.use_spmd()
print(json.dumps({"save": save, "restore": restore}[sys.argv[1]](sys.argv[2])), flush=True)
