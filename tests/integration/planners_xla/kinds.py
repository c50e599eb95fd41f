"""All kinds of tensors in one state, and what one kind saved loaded by each other. In a process with 4 devices."""

import sys
import warnings
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.runtime as xr
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch_xla.distributed.spmd import Mesh, mark_sharding

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper_planners.formats import TorchSaveReader

Kind = Callable[[torch.Tensor], torch.Tensor]


def on_devices(*spec: str | None) -> Kind:
    def placed(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.to(torch_xla.device())
        mark_sharding(moved, Mesh(np.arange(4), (2, 2), ("x", "y")), spec)
        return moved

    return placed


def kinds(mesh: DeviceMesh) -> dict[str, Kind]:
    return {
        "plain": torch.clone,
        "tiled": on_devices("x", "y"),
        "partly": on_devices("y", None),
        "unmarked": lambda tensor: tensor.to(torch_xla.device()),
        "sharded": lambda tensor: distribute_tensor(tensor, mesh, [Shard(1)]),
        "replicated": lambda tensor: distribute_tensor(tensor, mesh, [Replicate()]),
    }


SHAPE: Final = (7, 6)


def content(number: int) -> torch.Tensor:
    return torch.arange(42.0).view(SHAPE) + 100 * number


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.cpu()


def check(loaded: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(whole(loaded[name]), tensor), name


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    known = kinds(init_device_mesh("cpu", (1,)))
    pairs = list(product(known, known))
    wanted = {f"{was}-{becomes}": content(number) for number, (was, becomes) in enumerate(pairs)}
    saved = {name: known[name.partition("-")[0]](tensor) for name, tensor in wanted.items()}
    torch_xla.sync()
    save(saved, checkpoint_id=folder / "saved", planner=SPMDSavePlanner())

    def fresh() -> dict[str, torch.Tensor]:
        made = {name: known[name.partition("-")[2]](torch.zeros(SHAPE)) for name in wanted}
        torch_xla.sync()
        return made

    loaded = fresh()
    load(loaded, checkpoint_id=folder / "saved", planner=SPMDLoadPlanner())
    check(loaded, wanted)

    torch.save(wanted, folder / "whole.pt")
    from_file = fresh()
    reader = TorchSaveReader()
    load(from_file, checkpoint_id=folder / "whole.pt", storage_reader=reader, planner=SPMDLoadPlanner())
    check(from_file, wanted)


if __name__ == "__main__":
    xr.use_spmd()
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=0, world_size=1)
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
