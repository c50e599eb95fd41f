"""What README's script imports as its reader's own: a replicated model, and batches without an end."""

import itertools
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

PAUSE_S = 0.3
"""After each step."""


def build() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Tensor]]:
    """Return the model and its optimizer, alike on all ranks, and this rank's batches, of which each is the same."""
    torch.manual_seed(20)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    return model, torch.optim.AdamW(model.parameters()), itertools.repeat(batch)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """Do one step, with the gradients of all ranks added."""
    optimizer.zero_grad()
    torch.autograd.backward(model(batch).square().mean())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(PAUSE_S)
