"""Train a small transformer on the source of Python's standard library, whatever happens to the machine.

    python -m text_lm --checkpoint-uri file:///somewhere --preset demo

In a CheckpointedTrainingJob the flag isn't needed: the operator sets the root and the interval. `Training.state` has
everything that a training needs to continue exactly where it stopped, and `main` is the whole loop.
"""

import argparse
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch_xla.distributed.spmd.xla_sharding import Mesh

from stepkeeper import CheckpointManager, prime_optimizer
from text_lm.data import Loader, library_text, noisy_batch
from text_lm.model import ModelConfig, TextModel, parameter_specs, shard

SEED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Sizes of one run. Both presets pass their text twice."""

    model: ModelConfig
    batch_size: int
    text_bytes: int
    steps: int
    warm_up_steps: int
    learning_rate: float = 2e-3


PRESETS = {
    "demo": Preset(
        model=ModelConfig(width=64, window=96), batch_size=16, text_bytes=200_000, steps=300, warm_up_steps=40
    ),
    "test": Preset(
        model=ModelConfig(width=32, window=32, layers=1),
        batch_size=8,
        text_bytes=20_000,
        steps=200,
        warm_up_steps=20,
    ),
}


class RandomState:
    """The generators that the training draws from, as one entry of the checkpoint."""

    def __init__(self, seed: int) -> None:
        self.numpy = np.random.default_rng(seed)
        random.seed(seed)
        torch.manual_seed(seed)
        xm.set_rng_state(seed)

    def state_dict(self) -> dict[str, object]:
        return {
            "python": random.getstate(),
            "numpy": self.numpy.bit_generator.state,
            "torch": torch.get_rng_state(),
            "xla": xm.get_rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        self.numpy.bit_generator.state = state["numpy"]
        torch.set_rng_state(state["torch"])
        xm.set_rng_state(state["xla"])


class Training:
    """Model, optimizer and all that a step changes, on a 2 x (devices / 2) mesh."""

    def __init__(self, preset: Preset) -> None:
        self.rng = RandomState(SEED)
        n_devices = xr.global_runtime_device_count()
        self.mesh = Mesh(np.arange(n_devices), (2, n_devices // 2), ("data", "model"))
        self.model = TextModel(preset.model).to("xla")
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=preset.learning_rate, weight_decay=0.1, capturable=True
        )
        for parameter, spec in parameter_specs(self.model):
            shard(parameter, self.mesh, spec)
        # A restore fills what is there, and an optimizer has no moments before its first step.
        prime_optimizer(self.optimizer)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / preset.warm_up_steps))
        self.loader = Loader(
            library_text(preset.text_bytes),
            window=preset.model.window,
            batch_size=preset.batch_size,
            seed=SEED,
        )
        torch_xla.sync()

    @property
    def state(self) -> dict[str, object]:
        """Everything that a later process needs to continue as if nothing had happened."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "loader": self.loader,
            "rng": self.rng,
        }

    def step(self, windows: Tensor) -> float:
        """Do one optimizer step, and return its loss."""
        inputs, targets = (self._to_mesh(t) for t in noisy_batch(windows, self.rng.numpy))
        logits = self.model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        torch_xla.sync()
        return loss.item()

    def _to_mesh(self, batch: Tensor) -> Tensor:
        on_device = batch.to("xla")
        shard(on_device, self.mesh, ("data", None))
        return on_device


def main() -> None:
    options = parse_options()
    preset = PRESETS[options.preset]
    n_steps = options.steps or preset.steps
    # First of all: from here on, SIGTERM saves and stops.
    with open_manager(options.checkpoint_uri) as manager:
        xr.use_spmd()
        training = Training(preset)
        restored = manager.restore(training.state)
        step = restored.step if restored else 0
        print(f"start step={step}", flush=True)
        batches = iter(training.loader)
        while step < n_steps:
            loss = training.step(next(batches))
            step += 1
            print(f"step={step} epoch={training.loader.epoch} loss={loss:.4f} exact={loss.hex()}", flush=True)
            if manager.step(step, training.state, metrics={"loss": f"{loss:.4f}"}).stop:
                break
            time.sleep(options.pause_seconds)


def open_manager(checkpoint_uri: str | None) -> CheckpointManager:
    if checkpoint_uri is None:
        return CheckpointManager.from_env()
    return CheckpointManager(checkpoint_uri, save=20)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), default="demo")
    parser.add_argument("--steps", type=int, help="stop there; the preset's number of steps if left out")
    parser.add_argument(
        "--pause-seconds",
        type=float,
        default=0.0,
        help="rest after each step, so that a short training lasts",
    )
    parser.add_argument(
        "--checkpoint-uri", help="file:// or gs://; left out where the operator starts the process"
    )
    return parser.parse_args()
