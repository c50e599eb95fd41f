"""Run trainings on this machine, with which nothing interferes, and read what is saved of any."""

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import torch
from fork_server import TORCH, ForkServer
from free_ports import free_port
from page_blocks import ROOT

from stepkeeper import CheckpointManager, Options, Whole

_OWN: Final = Path(__file__).parent
_PATIENCE_S: Final = 200


class Undisturbed:
    """Trains on processes of this machine, each with one thread, as the pods have it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = ForkServer(*TORCH, env={"OMP_NUM_THREADS": "1"})

    def train_example(self, name: str, *, n_processes: int, n_steps: int) -> list[float]:
        """Train an example for so many steps, and return their losses."""
        uri = (self._folder / f"{name}-{n_steps}").as_uri()
        script = ROOT / "examples" / name / "train.py"
        self._run(n_processes, script, "--checkpoint-uri", uri, "--steps", n_steps)
        losses = losses_of(uri, n_steps)
        assert len(losses) == n_steps
        return losses

    def train_readmes_model(self, *, n_processes: int, n_steps: int) -> dict[str, torch.Tensor]:
        """Train what README's script trains for so many steps, and return the model."""
        path = self._folder / "model.pt"
        self._run(n_processes, _OWN / "undisturbed.py", n_steps, path)
        model: dict[str, torch.Tensor] = torch.load(path)
        return model

    def close(self) -> None:
        self._server.close()

    def _run(self, n_processes: int, *command: object) -> None:
        """Start the processes as torchrun does, with the same variables, and wait for their ends."""
        port = free_port()
        outputs = [self._folder / f"rank-{rank}.txt" for rank in range(n_processes)]
        with ExitStack() as stack:
            processes = []
            for rank, output in enumerate(outputs):
                env = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{n_processes}"}
                env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "OMP_NUM_THREADS": "1"}
                said = stack.enter_context(output.open("w"))
                process = self._server.start(
                    command, env=os.environ | env, stdout=said, stderr=subprocess.STDOUT
                )
                stack.callback(process.kill)
                processes.append(process)
            codes = [process.wait(_PATIENCE_S) for process in processes]
        assert codes == [0] * n_processes, "\n".join(output.read_text()[-2000:] for output in outputs)


def losses_of(uri: str, step: int) -> list[float]:
    losses: list[float] = []
    with CheckpointManager(uri, options=Options(stop_on_notice=False)) as manager:
        manager.restore({"losses": Whole(losses)}, step, items=["losses"])
    return losses


def model_of(uri: str, step: int, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read the model that was saved with a step, whose tensors are shaped like these."""
    model = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    with CheckpointManager(uri, options=Options(stop_on_notice=False)) as manager:
        manager.restore({"model": model}, step, items=["model"])
    return model
