"""Run trainings on this machine, with which nothing interferes, and read what is saved of any."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import torch
from page_blocks import ROOT

from stepkeeper import CheckpointManager, Whole

__all__ = ["losses_of", "model_of", "train_example", "train_readmes_model"]

_OWN: Final = Path(__file__).parent


def train_example(name: str, folder: Path, *, n_processes: int, n_steps: int) -> list[float]:
    """Train an example for so many steps, and return their losses."""
    uri = (folder / f"{name}-{n_processes}").as_uri()
    script = ROOT / "examples" / name / "train.py"
    _torchrun(n_processes, script, "--checkpoint-uri", uri, "--steps", n_steps)
    losses = losses_of(uri, n_steps)
    assert len(losses) == n_steps
    return losses


def train_readmes_model(folder: Path, *, n_processes: int, n_steps: int) -> dict[str, torch.Tensor]:
    """Train what README's script trains for so many steps, and return the model."""
    path = folder / "model.pt"
    _torchrun(n_processes, _OWN / "undisturbed.py", n_steps, path)
    model: dict[str, torch.Tensor] = torch.load(path)
    return model


def losses_of(uri: str, step: int) -> list[float]:
    """Read the losses that an example has saved with a step."""
    losses: list[float] = []
    with CheckpointManager(uri, chkpt_on_preemption=False) as manager:
        manager.restore(step, {"losses": Whole(losses)}, items=["losses"])
    return losses


def model_of(uri: str, step: int, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read the model that was saved with a step, whose tensors are shaped like these."""
    model = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    with CheckpointManager(uri, chkpt_on_preemption=False) as manager:
        manager.restore(step, {"model": model}, items=["model"])
    return model


def _torchrun(n_processes: int, script: Path, *arguments: object) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(n_processes), str(script), *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
