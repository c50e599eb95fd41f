"""Mixed state through torch's own `save` and `load`: our planners on one side, stock ones on the other."""

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner, adapters

Spec = tuple[Any, ...]
MESHES: list[tuple[tuple[int, ...], Spec, Spec]] = [
    ((4,), (0, None), (0,)),
    ((2, 2), (0, 1), (None,)),
    ((2, 2), (None, 1), (0,)),
    ((2, 2), ((1, 0), None), (1,)),
    ((2, 1, 2), (2, None), (0,)),
    ((1, 4), (None, 1), ((0, 1),)),
    ((1, 1, 4), (0, 1), (None,)),
]


class Trainer:
    """A model with sharded, replicated and unsharded parameters, an optimizer, a schedule and what else there is."""

    def __init__(self, seed: int, mesh_index: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 12), torch.nn.LayerNorm(12), torch.nn.Linear(12, 8)
        )
        self.model = self.model.to("xla")
        mesh_shape, matrix, vector = MESHES[mesh_index]
        mesh = xs.Mesh(np.arange(4), mesh_shape)
        layers: Any = self.model
        xs.mark_sharding(layers[0].weight, mesh, matrix)
        xs.mark_sharding(layers[0].bias, mesh, vector)
        xs.mark_sharding(layers[2].bias, mesh, (None,))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3)
        self.mean = torch.full((7, 5), float(seed)).to("xla")
        xs.mark_sharding(self.mean, mesh, (0, *[None] * 1))
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 8).to("xla")).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()
            torch_xla.sync()
        shared = torch.arange(6.0) + seed
        generator = np.random.default_rng(seed)
        self.state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "mean": self.mean,
            "step": seed,
            "half": torch.arange(5).to(torch.bfloat16) + seed,
            "scalar": torch.tensor(float(seed)),
            "empty": torch.empty(0, 3),
            "strided": (torch.arange(12.0) + seed).reshape(3, 4).t(),
            "tied": [shared, shared],
            "rng": {
                "torch": torch.get_rng_state(),
                "python": random.Random(seed).getstate(),
                "numpy": generator.bit_generator.state,
                "legacy": np.random.RandomState(seed).get_state(),
            },
            "data": {
                "epoch": 1,
                "seen": np.arange(4) + seed,
                "order": [3, 1, 2, seed],
                "done": None,
                "p": 0.1 * seed,
            },
        }


def on_cpu(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return node.detach().cpu().clone()
    if isinstance(node, dict):
        return {key: on_cpu(value) for key, value in node.items()}
    return [on_cpu(value) for value in node] if isinstance(node, list) else node


def blank(node: Any) -> Any:
    """The same tree with other content."""
    if isinstance(node, torch.Tensor):
        return torch.zeros_like(node)
    if isinstance(node, dict):
        return {key: blank(value) for key, value in node.items()}
    if isinstance(node, list):
        return [blank(value) for value in node]
    return None


def assert_equal(a: Any, b: Any, path: str = "") -> None:
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, path
        assert torch.equal(
            a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
        ), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_equal(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert type(a) is type(b), path
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{path}.{index}")
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype, path
        assert np.array_equal(a, b), path
    else:
        assert type(a) is type(b), path
        assert a == b, path


def ours_to_stock(folder: Path, index: int) -> None:
    trainer = Trainer(1, index, steps=2)
    want = on_cpu(trainer.state)
    planner = SPMDSavePlanner()
    save(trainer.state, storage_writer=FileSystemWriter(folder, thread_count=1 + index % 2), planner=planner)
    assert "model.0.weight" in planner.sharded_state_dict or index == 6
    assert "step" in planner.unsharded_state_dict
    got = blank(want)
    load(got, storage_reader=FileSystemReader(folder))
    assert_equal(got, want)


def stock_to_ours(folder: Path, index: int) -> None:
    source = Trainer(2, 0, steps=2)
    want = on_cpu(source.state)
    save(want, storage_writer=FileSystemWriter(folder))
    into(folder, index, want)


def into(folder: Path, index: int, want: Any) -> None:
    target = Trainer(5, index, steps=1)
    specs = [torch_xla._XLAC._get_xla_sharding_spec(p) for p in target.model.parameters()]
    load(target.state, storage_reader=FileSystemReader(folder), planner=SPMDLoadPlanner())
    assert_equal(on_cpu(target.state), want)
    assert specs == [torch_xla._XLAC._get_xla_sharding_spec(p) for p in target.model.parameters()]
    assert_equal(on_cpu(target.model.state_dict()), want["model"])
    target.optimizer.load_state_dict(target.state["optimizer"])
    assert_equal(on_cpu(target.optimizer.state_dict()), want["optimizer"])


def statefuls(folder: Path) -> None:
    """Objects instead of state dicts: torch calls state_dict() and load_state_dict() around the planner."""
    source, target = Trainer(1, 1, steps=2), Trainer(4, 2, steps=1)
    for trainer, call in ((source, "save"), (target, "load")):
        objects = {
            "model": trainer.model,
            "nested": {"optimizer": trainer.optimizer, "schedule": trainer.schedule},
        }
        if call == "save":
            save(objects, storage_writer=FileSystemWriter(folder), planner=SPMDSavePlanner())
        else:
            load(objects, storage_reader=FileSystemReader(folder), planner=SPMDLoadPlanner())
    assert_equal(on_cpu(target.model.state_dict()), on_cpu(source.model.state_dict()))
    assert_equal(on_cpu(target.optimizer.state_dict()), on_cpu(source.optimizer.state_dict()))
    assert_equal(target.schedule.state_dict(), source.schedule.state_dict())
    pending = torch_xla._XLAC._check_tensor_need_materialization(list(target.model.parameters()))
    assert not any(pending)
    assert adapters.select_sharded({"t": next(target.model.parameters())})


if __name__ == "__main__":
    xr.use_spmd()
    root = Path(sys.argv[1])
    for number in range(len(MESHES)):
        ours_to_stock(root / f"ours-to-stock-{number}", number)
        stock_to_ours(root / f"stock-to-ours-{number}", number)
    statefuls(root / "statefuls")
