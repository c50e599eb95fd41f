"""The example in torch_xla's documentation of CheckpointManager, word for word: python documented.py FOLDER STEPS.

Where it says "…" a training step stands, where it says gs://my-bucket/my-experiment a folder, and prime_optimizer is
imported: nothing else is changed. No guard, no sync, no process group.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from torch_xla.experimental.distributed_checkpoint import CheckpointManager as Theirs

from stepkeeper.torch_xla import CheckpointManager, prime_optimizer

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])

xr.use_spmd()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).to("xla")
mesh = xs.Mesh(np.arange(4), (2, 2), ("x", "y"))
for layer in model:
    weight: Any = layer.weight
    xs.mark_sharding(weight, mesh, ("x", "y"))
optim = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
torch_xla.sync()
compiled: list[int] = []


def batches() -> Iterator[torch.Tensor]:
    """Yield batches like a device loader: the step is synced when the next batch is asked for."""
    for _ in range(STEPS):
        yield torch.ones(8, 64, device="xla")
        torch_xla.sync()
        data = met.metric_data("CompileTime")
        compiled.append(0 if data is None else int(data[0]))


def train_step(data: torch.Tensor) -> None:
    optim.zero_grad()
    torch.autograd.backward((model(data) ** 2).sum())
    optim.step()


text = "\n".join(
    line.strip().removeprefix(">>>").removeprefix(" ")
    for line in (Theirs.__doc__ or "").splitlines()
    if line.strip().startswith(">>>")
)
assert "gs://my-bucket/my-experiment" in text
assert "  ...\n" in text
text = text.replace("gs://my-bucket/my-experiment", str(FOLDER / "root")).replace("...", "train_step(data)")
names: dict[str, Any] = {
    "CheckpointManager": CheckpointManager,
    "prime_optimizer": prime_optimizer,
    "model": model,
    "optim": optim,
    "dataloader": batches(),
    "train_step": train_step,
}
exec(text, names)  # what a user would paste
manager = names["chkpt_mgr"]
manager.join()
found = {
    "found": names["tracked_steps"],
    "compiled": compiled,
    "steps": manager.all_steps(),
    "error": manager.health().error,
}
print(json.dumps(found), flush=True)
manager.close()
