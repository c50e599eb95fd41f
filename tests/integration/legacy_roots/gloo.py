"""One of several ranks on gloo: python gloo.py RANK WORLD_SIZE FOLDER save|resume. By stock DCP, and by ours."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from stepkeeper import CheckpointManager

RANK, WORLD_SIZE, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
ROOT = FOLDER / "root"


def whole_at(step: int) -> torch.Tensor:
    return torch.arange(96.0).view(12, 8) + step


def state_at(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    whole = whole_at(step) if step else torch.zeros(12, 8)
    model = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.full((5,), float(step))}
    return {"model": model, "step": step, "names": ["x", {"y": step}]}


def save_stock() -> None:
    for step in (100, 200):
        save(state_at(step), checkpoint_id=ROOT / f"step-{step}")


def resume() -> None:
    """Each world size in a root of its own: the first one's commits are not the other's."""
    root = FOLDER / f"on-{WORLD_SIZE}"
    state = state_at(0)
    with CheckpointManager(root.as_uri(), 10**6, chkpt_on_preemption=False) as manager:
        assert manager.all_steps() == [100, 200]
        result = manager.restore_latest(state)
        assert result is not None
        assert (result.step, state["step"], state["names"]) == (200, 200, ["x", {"y": 200}])
        w = state["model"]["w"]
        assert isinstance(w, DTensor)
        assert torch.equal(w.full_tensor(), whole_at(200))
        assert torch.equal(state["model"]["b"], torch.full((5,), 200.0))
        manager.save(201, state_at(201), force=True)
        assert manager.all_steps() == [100, 200, 201]
        manager.restore(100, state)
        assert torch.equal(w.full_tensor(), whole_at(100))
    again = state_at(0)
    with CheckpointManager(root.as_uri(), 10**6, chkpt_on_preemption=False) as manager:
        result = manager.restore_latest(again)
        assert result is not None
        assert result.step == again["step"] == 201
        assert torch.equal(again["model"]["w"].full_tensor(), whole_at(201))


def main() -> None:
    store = FileStore(str(FOLDER / f"ranks-{sys.argv[4]}-{WORLD_SIZE}"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD_SIZE)
    {"save": save_stock, "resume": resume}[sys.argv[4]]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
