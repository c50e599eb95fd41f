"""Train a replicated model on any number of processes, and continue with any other number.

    torchrun --standalone --nproc-per-node 4 train.py --checkpoint-uri file:///var/tmp/ddp --steps 200

In a CheckpointedTrainingJob (job.yaml) the flag --checkpoint-uri isn't needed: the operator sets the root.
Every process runs every line: there is no map_location, no barrier, and nothing that only rank 0 does.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import stepkeeper
from stepkeeper import CheckpointManager, Whole, prime_optimizer

SEED = 20
WIDTH = 512
INPUTS, CLASSES = 64, 10
BATCH_SIZE = 64
"""Samples of a step in all processes together: the training is the same on any number of processes that divides it."""


def build_model() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES)
    )


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return this process's part of the step's batch: points whose classes no line separates."""
    generator = torch.Generator().manual_seed(SEED + step)
    points = torch.randn(BATCH_SIZE, INPUTS, generator=generator)
    labels = (points[:, 0] * points[:, 1] * 4).long().remainder(CLASSES)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    return points[mine], labels[mine]


def loss_at(model: nn.Module, step: int) -> Tensor:
    points, labels = batch_of(step)
    return functional.cross_entropy(model(points), labels)


def settle_buckets(model: DistributedDataParallel) -> None:
    """Make DDP divide the gradients into buckets as it does for the rest of the run.

    It does so once, in the order in which its first backward pass came by them, and sums in other buckets differ in
    their last bits. So no step of the training has the first ones, neither at the start nor after a restore.
    """
    torch.autograd.backward(loss_at(model, 0))
    model.zero_grad()


def mean_over_processes(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> None:
    options = parse_options()
    stepkeeper.distributed.init()
    model = DistributedDataParallel(build_model())
    # A restore fills what is there: the optimizer has its state before the first step.
    optimizer = prime_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
    scheduler = CosineAnnealingLR(optimizer, T_max=1000)
    losses: list[float] = []
    # The list grows, so it is saved as one value, and a restore fills it in place.
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "losses": Whole(losses)}
    with open_manager(options.checkpoint_uri) as manager:
        settle_buckets(model)
        restored = manager.restore(state)
        step = restored.step if restored else 0
        print(f"start step={step} processes={dist.get_world_size()}", flush=True)
        while step < options.steps:
            loss = loss_at(model, step)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            scheduler.step()
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
    return CheckpointManager(checkpoint_uri, save=10)


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
