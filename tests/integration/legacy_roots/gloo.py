"""One of several ranks on gloo: python gloo.py RANK WORLD_SIZE FOLDER save|resume. By stock DCP, and by ours."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from stepkeeper_testing.trainer import join, open_manager

RANK, WORLD_SIZE, FOLDER, MODE = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
WHOLE = torch.arange(96.0).view(12, 8)


def state_at(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    whole = WHOLE + step if step else torch.zeros(12, 8)
    model = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.full((5,), float(step))}
    return {"model": model, "step": step, "names": ["x", {"y": step}]}


def resume() -> None:
    """Each world size in a root of its own: the first one's commits are not the other's."""
    for steps in ([100, 200], [100, 200, 201]):
        state = state_at(0)
        with open_manager(FOLDER / f"on-{WORLD_SIZE}") as manager:
            assert manager.steps() == steps
            assert manager.restore(state) is not None
            assert (state["step"], state["names"]) == (steps[-1], ["x", {"y": steps[-1]}])
            assert torch.equal(state["model"]["w"].full_tensor(), WHOLE + steps[-1])
            assert torch.equal(state["model"]["b"], torch.full((5,), float(steps[-1])))
            if len(steps) == 2:
                manager.save(201, state_at(201)).result()
                manager.restore(state, 100)
                assert torch.equal(state["model"]["w"].full_tensor(), WHOLE + 100)


join(RANK, WORLD_SIZE, FOLDER)
if MODE == "resume":
    resume()
else:
    for each in (100, 200):
        save(state_at(each), checkpoint_id=FOLDER / "root" / f"step-{each}")
dist.destroy_process_group()
