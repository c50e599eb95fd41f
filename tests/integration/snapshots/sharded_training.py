"""A training on four devices of torch_xla, with tensors that are sharded in every way that a user may choose."""

from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
from torch import nn

from stepkeeper import RandomState, prime_optimizer


class Training:
    """AdamW that steps in place, so that what follows the state instead of being a copy of it changes at once."""

    def __init__(self, width: int = 256, *, small: bool = False) -> None:
        """With `small`, it is one layer with a primed optimizer, and a step takes little time, and random numbers."""
        torch.manual_seed(1)
        xm.set_rng_state(11)
        mesh = xs.Mesh(np.arange(4), (2, 2), ("x", "y"))
        self.width, self.is_small = width, small
        layers = [
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Linear(width, 33),
            nn.Linear(33, width),
        ][: 1 if small else None]
        self.model = nn.Sequential(*layers).to("xla")
        specs: list[tuple[str | None, ...]] = [("x", "y"), ("x", None), (None, "y"), (None, None)]
        self.parameters = list(self.model.parameters())
        for layer, spec in zip(layers, specs, strict=False):
            xs.mark_sharding(layer.weight, mesh, spec)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.01, capturable=True)
        self.extra: dict[str, torch.Tensor] = {}
        if small:
            torch_xla.sync()
            prime_optimizer(self.optimizer)
            return
        self.extra = {
            "everywhere": torch.randn(512, 256).to("xla"),
            "uneven": torch.randn(255, 34).to("xla"),
            "half": torch.randn(64, 8, 16).bfloat16().to("xla"),
            "bytes": torch.arange(200, dtype=torch.uint8).to("xla"),
            "number": torch.tensor(3.0).to("xla"),
            "nothing": torch.zeros(0, 4).to("xla"),
            "host": torch.randn(300, 7),
        }
        xs.mark_sharding(self.extra["uneven"], mesh, ("x", "y"))
        xs.mark_sharding(self.extra["half"], mesh, (None, "x", "y"))
        torch_xla.sync()

    @property
    def state(self) -> dict[str, Any]:
        state = {"model": self.model, "optimizer": self.optimizer, "extra": self.extra, "epoch": 3}
        return {**state, "random": RandomState()} if self.is_small else state

    def step(self, *, sync: bool = True) -> None:
        self.optimizer.zero_grad()
        draw = torch.rand if self.is_small else torch.ones
        out = self.model(draw(8, self.width, device="xla"))
        torch.autograd.backward((out**2).sum())
        self.optimizer.step()
        with torch.no_grad():
            for tensor in self.extra.values():
                tensor.add_(1)
        if sync:
            torch_xla.sync()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            **{f"model.{name}": p for name, p in self.model.named_parameters()},
            **{
                f"optimizer.{index}.{name}": value
                for index, p in enumerate(self.parameters)
                for name, value in self.optimizer.state[p].items()
            },
            **{f"extra.{name}": tensor for name, tensor in self.extra.items()},
        }

    def on_host(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.tensors().items()}

    def bits(self) -> list[str]:
        return [
            tensor.view(-1).view(torch.uint8).numpy().tobytes().hex() for tensor in self.on_host().values()
        ]

    def scramble(self) -> None:
        with torch.no_grad():
            for tensor in self.tensors().values():
                tensor.zero_()
        torch_xla.sync()


def compilations() -> int:
    data = met.metric_data("CompileTime")
    return 0 if data is None else int(data[0])
