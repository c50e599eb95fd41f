"""Print what a training does, to the bit, and send its process SIGTERM at a batch: SCRIPT ROOT KIND STOP_AT."""

import hashlib
import os
import signal
import sys
from typing import Any, Final

import torch
from torch import nn
from typing_extensions import override

import stepkeeper

ROOT: Final = sys.argv[1]
KINDS: Final = frozenset(sys.argv[2].split("-"))
"""What is special about this training, such as `workers`."""

_STOP_AT: Final = int(sys.argv[3])
"""Number of the batch, from this process's first one on, at which it gets SIGTERM; 0: never."""

_seen = 0


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """22 items, with noise from the global generator if this is asked for."""

    def __len__(self) -> int:
        return 22

    @override
    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(4) / 100 if "noise" in KINDS else 0
        return torch.full((4,), float(index)) + noise


def begin() -> int:
    """Join the other ranks, if there are any, and return the number of workers of the data loader."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        stepkeeper.distributed.init()
    return 2 if "workers" in KINDS else 0


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))


def loss_of(net: Any, batch: torch.Tensor) -> torch.Tensor:
    return (net(batch / 22) - batch[:, :1].sin()).square().mean()  # type: ignore[no-any-return]


def note_batch(what: str, batch: torch.Tensor, loss: torch.Tensor, *more: object) -> None:
    """Print a batch and its loss. In a training, this may be the batch at which the process gets SIGTERM."""
    global _seen
    if what == "train":
        _seen += 1
        if _seen == _STOP_AT:
            os.kill(os.getpid(), signal.SIGTERM)
    print(what, batch.flatten().tolist(), float(loss.detach()).hex(), *more, flush=True)


def note_end(model: nn.Module, step: int) -> None:
    """Print a digest of the model, and the next random number."""
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    print("end", step, hashlib.sha256(weights).hexdigest(), torch.rand(1).item(), flush=True)
