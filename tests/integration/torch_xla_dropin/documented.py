"""The loop of torch_xla's documentation: python documented.py ROOT STEPS. No __main__ guard, no sync before a save."""

import json
import sys

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from stepkeeper import CheckpointManager, prime_optimizer

root, n_steps = sys.argv[1], int(sys.argv[2])
xr.use_spmd()
torch.manual_seed(1)
mesh = xs.Mesh(np.arange(4), (2, 2), ("data", "model"))
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).to("xla")
xs.mark_sharding(model[0].weight, mesh, ("model", None))
optim = torch.optim.AdamW(model.parameters(), lr=0.01)


def batches() -> "list[torch.Tensor]":
    torch.manual_seed(2)
    return [torch.randn(4, 16) for _ in range(n_steps)]


def n_compiled() -> int:
    data = met.metric_data("CompileTime")
    return 0 if data is None else int(data[0])


compiled: list[int] = []
saved: list[int] = []

chkpt_mgr = CheckpointManager(root, 10)
tracked_steps = chkpt_mgr.all_steps()
if tracked_steps:
    best_step = max(tracked_steps)
    prime_optimizer(optim)
    state_dict = {"model": model.state_dict(), "optim": optim.state_dict()}
    chkpt_mgr.restore(best_step, state_dict)
    model.load_state_dict(state_dict["model"])
    optim.load_state_dict(state_dict["optim"])

for step, data in enumerate(batches()):
    torch_xla.sync()  # as the loader of torch_xla does before it hands out the next batch
    compiled.append(n_compiled())
    optim.zero_grad()
    model(data.to("xla")).pow(2).sum().backward()
    optim.step()
    state_dict = {"model": model.state_dict(), "optim": optim.state_dict()}
    if chkpt_mgr.save_async(step, state_dict):
        saved.append(step)
chkpt_mgr.join()
compiled.append(n_compiled())
print(
    json.dumps(
        {"tracked": tracked_steps, "saved": saved, "compiled": compiled, "steps": chkpt_mgr.all_steps()}
    )
)
