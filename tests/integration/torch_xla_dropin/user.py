"""Code written for torch_xla's planners. Which library it runs with is all that differs: `import … as xc`."""

import hashlib
import importlib
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch_xla.distributed.spmd import XLAShardedTensor

xc: Any = importlib.import_module(sys.argv[1])


class Trainer:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 7), torch.nn.Linear(7, 4)
        ).to("xla")
        mesh, layers = xs.Mesh(np.arange(4), (4, 1), ("data", "model")), self.model
        for index, spec in ((0, ("data", None)), (2, ("data", None))):
            weight: Any = layers[index].weight
            xs.mark_sharding(weight, mesh, spec)
        # Replicated on purpose: what is left to the compiler, torch_xla's planners may lose.
        for p in self.model.parameters():
            if not torch_xla._XLAC._get_xla_sharding_spec(p):
                xs.mark_sharding(p, mesh, (None,) * p.dim())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": {"momentum": self.momentum()},
            "step": 7,
            "names": ["a", "b"],
            "cpu": torch.arange(5),
            "nested": [{"w": torch.ones(2), "lr": 0.1}, torch.zeros(0, 3)],
        }

    def momentum(self) -> dict[str, Any]:
        by_parameter = self.optimizer.state
        return {str(i): by_parameter[p]["momentum_buffer"] for i, p in enumerate(self.model.parameters())}


def digest(data: Any) -> str:
    if isinstance(data, io.BytesIO):
        return repr(torch.load(io.BytesIO(data.getvalue()), weights_only=False))
    tensor = data.detach().cpu().contiguous()
    raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(raw.numpy().tobytes()).hexdigest()}"


def chunk_of(item: Any) -> Any:
    if item.tensor_data is None:
        return [item.index.fqn]
    data = item.tensor_data
    place = [list(data.chunk.offsets), list(data.chunk.sizes), list(data.size), str(data.properties.dtype)]
    return [item.index.fqn, *place]


def sharded_kinds(tensors: dict[str, Any]) -> dict[str, Any]:
    assert all(isinstance(tensor, XLAShardedTensor) for tensor in tensors.values())
    return {
        name: [tensor.sharding_spec, tensor.sharding_type.name] for name, tensor in sorted(tensors.items())
    }


def plan_by_hand(trainer: Trainer) -> dict[str, Any]:
    """Drive a planner as a user's own storage writer does."""
    planner = xc.SPMDSavePlanner()
    assert issubclass(xc.SPMDSavePlanner, SavePlanner)
    seen: dict[str, Any] = {"before": planner.is_coordinator}
    planner.set_up_planner(trainer.state(), is_coordinator=True)
    seen["coordinator"] = planner.is_coordinator
    seen["mappings"] = sorted((name, list(path)) for name, path in planner.mappings.items())
    seen["sharded"] = sharded_kinds(planner.sharded_state_dict)
    seen["unsharded"] = {
        name: type(value).__name__ for name, value in sorted(planner.unsharded_state_dict.items())
    }
    local = planner.create_local_plan()
    seen["items"] = sorted(chunk_of(item) for item in local.items)
    seen["kinds"] = sorted((item.index.fqn, item.tensor_data is None) for item in local.items)
    plans, metadata = planner.create_global_plan([local])
    seen["stored"] = {
        name: sorted([list(c.offsets), list(c.sizes)] for c in stored.chunks)
        if isinstance(stored, TensorStorageMetadata)
        else "value"
        for name, stored in sorted(metadata.state_dict_metadata.items())
    }
    seen["paths"] = sorted((name, list(path)) for name, path in metadata.planner_data.items())
    final = planner.finish_plan(plans[0])
    seen["data"] = sorted([*chunk_of(item), digest(planner.resolve_data(item))] for item in final.items)
    return seen


def saved_and_loaded(first: Trainer, second: Trainer, folder: Path) -> dict[str, Any]:
    save(first.state(), storage_writer=FileSystemWriter(folder), planner=xc.SPMDSavePlanner())
    target = second.state() | {"step": 0, "names": []}
    held = [id(target["model"]["0.weight"]), id(target["cpu"]), id(target["nested"][0])]
    specs = {n: torch_xla._XLAC._get_xla_sharding_spec(p) for n, p in second.model.named_parameters()}
    planner = xc.SPMDLoadPlanner()
    assert issubclass(xc.SPMDLoadPlanner, LoadPlanner)
    load(target, storage_reader=FileSystemReader(folder), planner=planner)
    now = {n: torch_xla._XLAC._get_xla_sharding_spec(p) for n, p in second.model.named_parameters()}
    return {
        "attributes": [
            planner.is_coordinator,
            planner.original_state_dict is target,
            planner.metadata is not None,
        ],
        "mappings": sorted((name, list(path)) for name, path in planner.mappings.items()),
        "sharded": sharded_kinds(planner.sharded_state_dict),
        "unsharded": sorted(planner.unsharded_state_dict),
        "in place": held == [id(target["model"]["0.weight"]), id(target["cpu"]), id(target["nested"][0])],
        "specs kept": specs == now,
        "model": {n: digest(p) for n, p in second.model.state_dict().items()},
        "momentum": {n: digest(p) for n, p in target["optimizer"]["momentum"].items()},
        "values": repr([target["step"], target["names"], target["nested"][0]["lr"]]),
        "tensors": [digest(target["cpu"]), digest(target["nested"][0]["w"]), digest(target["nested"][1])],
    }


def load_by_hand(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """Drive a planner as a user's own storage reader does."""
    planner, reader = xc.SPMDLoadPlanner(), FileSystemReader(folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(trainer.state(), metadata, is_coordinator=True)
    plan = planner.finish_plan(planner.create_global_plan([planner.create_local_plan()])[0])
    wanted = sorted(
        [i.dest_index.fqn, list(i.storage_offsets), list(i.dest_offsets), list(i.lengths)]
        for i in plan.items
        if i.type.name == "TENSOR" and i.dest_index.fqn in planner.sharded_state_dict
    )
    reader.read_data(plan, planner).wait()
    return {"wanted": wanted, "model": {n: digest(p) for n, p in trainer.model.state_dict().items()}}


def primed(trainer: Trainer) -> list[Any]:
    assert xc.prime_optimizer(trainer.optimizer) is trainer.optimizer
    return [[list(t.shape), str(t.dtype), str(t.device)] for t in trainer.momentum().values()]


def main(folder: Path) -> None:
    first, second, third = Trainer(1), Trainer(2), Trainer(3)
    seen: dict[str, Any] = {"primed": [primed(trainer) for trainer in (first, second, third)]}
    for buffer in first.momentum().values():
        buffer.fill_(2.5)
    torch_xla.sync()
    # torch_xla's planner fails now and then where it comes before the values that it lists.
    xm.wait_device_ops()
    seen["by hand"] = plan_by_hand(first)
    seen["through torch"] = saved_and_loaded(first, second, folder / "checkpoint")
    seen["read by hand"] = load_by_hand(third, folder / "checkpoint")
    (folder / "seen.json").write_text(json.dumps(seen, indent=1))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    xr.use_spmd()
    main(Path(sys.argv[2]))
