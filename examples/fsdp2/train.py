"""Train a model that is divided among all processes (FSDP2, DTensor), and continue with any other number.

    torchrun --standalone --nproc-per-node 2 train.py --checkpoint-uri file:///var/tmp/fsdp2 --steps 100

In a CheckpointedTrainingJob (job.yaml) the flag --checkpoint-uri isn't needed: the operator sets the root.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import stepkeeper
from stepkeeper import CheckpointManager, Whole, prime_optimizer

SEED = 20
WIDTH = 256
INPUTS, CLASSES = 64, 10
BATCH_SIZE = 64
"""Samples of a step in all processes together: the training is the same on any number of processes that divides it."""


def build_model(device: torch.device) -> nn.Sequential:
    """Build the model on every process alike, then keep a part of each parameter on each."""
    torch.manual_seed(SEED)
    layers = [
        nn.Linear(INPUTS, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Linear(WIDTH, CLASSES),
    ]
    model = nn.Sequential(*layers).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def batch_of(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return this process's part of the step's batch: points whose classes no line separates."""
    generator = torch.Generator().manual_seed(SEED + step)
    points = torch.randn(BATCH_SIZE, INPUTS, generator=generator)
    labels = (points[:, 0] * points[:, 1] * 4).long().remainder(CLASSES)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return points[mine].to(device), labels[mine].to(device)


def mean_over_processes(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    options = parse_options()
    this = stepkeeper.distributed.init()
    model = build_model(this.device)
    # A restore fills what is there: the optimizer has its state before the first step.
    optimizer = prime_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
    losses: list[float] = []
    # The list grows, so it is saved as one value, and a restore fills it in place.
    state = {"model": model, "optimizer": optimizer, "losses": Whole(losses)}
    with open_manager(options.checkpoint_uri) as manager:
        restored = manager.restore(state)
        step = restored.step if restored else 0
        print(f"start step={step} processes={this.world_size}", flush=True)
        while step < options.steps:
            points, labels = batch_of(step, this.device)
            loss = functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            step += 1
            losses.append(mean_over_processes(loss))
            print(f"step={step} loss={losses[-1]:.6f}", flush=True)
            if manager.step(step, state, metrics={"loss": losses[-1]}).stop:
                break
            time.sleep(options.pause_seconds)
    dist.destroy_process_group()


def open_manager(checkpoint_uri: str | None) -> CheckpointManager:
    if checkpoint_uri is None:
        return CheckpointManager.from_env()
    return CheckpointManager(checkpoint_uri, save=50)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint-uri", help="file:// or gs://; left out in a CheckpointedTrainingJob")
    parser.add_argument("--steps", type=int, default=200, help="stop there; the last step is saved")
    parser.add_argument("--pause-seconds", type=float, default=0.0, help="rest after each step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
