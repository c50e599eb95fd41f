"""Every placement of a tensor saved, and loaded onto every other one: all pairs, or a sample of them.

One checkpoint has a tensor for each placement of one shape; a load gives each of them another placement. Stock planners
read the checkpoint, and what they write loads onto all placements.
"""

import random
import sys
import warnings
from itertools import permutations, product
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from stepkeeper_planners import SPMDLoadPlanner, SPMDSavePlanner
from stepkeeper_planners.adapters import xla_sharding

MESHES: Final = (
    (4,),
    (1, 4),
    (4, 1),
    (2, 2),
    (2, 2, 1),
    (2, 1, 2),
    (1, 2, 2),
    (4, 1, 1),
    (1, 4, 1),
    (1, 1, 4),
)
ORDERS: Final = ((0, 1, 2, 3), (3, 1, 0, 2))
SHAPES: Final = ((), (0, 3), (1,), (3,), (8,), (2, 3), (7, 5), (8, 8), (5, 1, 6))
"""0-dim, empty, fewer rows than devices, uneven, even."""
DTYPES: Final = (
    "float32 float64 float16 bfloat16 complex64 complex128 float8_e4m3fn float8_e5m2 bool int8 int16 int32 "
)
NAMES: Final = tuple((DTYPES + "int64 uint8 uint16 uint32 uint64").split())
Placement = tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...]]


def specs_for(axes: int, dims: int) -> list[tuple[Any, ...]]:
    """Each mesh axis on some dimension or none; several axes on one dimension in each order."""
    specs: set[tuple[Any, ...]] = set()
    for places in product(range(-1, dims), repeat=axes):
        for order in permutations(range(axes)):
            grouped = [tuple(axis for axis in order if places[axis] == dim) for dim in range(dims)]
            specs.add(tuple(None if not g else g[0] if len(g) == 1 else g for g in grouped))
    return sorted(specs, key=str)


def placements(shape: tuple[int, ...]) -> list[Placement | None]:
    """Those that differ in what XLA makes of them; None is a tensor that was never marked."""
    found: dict[str, Placement | None] = {"": None}
    if not shape or not prod(shape):
        # torch_xla itself can't cut these.
        return [None, (MESHES[0], ORDERS[0], (None,) * len(shape))]
    for mesh_shape, order in product(MESHES, ORDERS):
        for spec in specs_for(len(mesh_shape), len(shape)):
            where = (mesh_shape, order, spec)
            found.setdefault(spec_of(placed(torch.zeros(shape), where)), where)
    return list(found.values())


def placed(tensor: torch.Tensor, where: Placement | None) -> torch.Tensor:
    on_device = tensor.to("xla")
    if where is not None:
        mesh_shape, order, spec = where
        xs.mark_sharding(on_device, xs.Mesh(np.array(order), mesh_shape), spec)
    return on_device


def spec_of(tensor: torch.Tensor) -> str:
    text: str = torch_xla._XLAC._get_xla_sharding_spec(tensor)
    return text


def source(shape: tuple[int, ...], number: int) -> torch.Tensor:
    """Each number's own dtype and elements."""
    name = NAMES[number % len(NAMES)]
    raw = torch.arange(1, prod(shape) + 1).reshape(shape) + number % 7
    return (raw % 2).bool() if name == "bool" else raw.to(getattr(torch, name))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    x, y = (t.detach().cpu().contiguous().reshape(-1) for t in (a, b))
    return x.dtype == y.dtype and a.shape == b.shape and torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def one_shape(folder: Path, shape: tuple[int, ...], n_shifts: int | None) -> int:
    everywhere = placements(shape)
    sources = [source(shape, number) for number in range(len(everywhere))]
    state = {str(i): placed(sources[i], where) for i, where in enumerate(everywhere)}
    save(state, storage_writer=FileSystemWriter(folder), planner=SPMDSavePlanner())
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    for i, where in enumerate(everywhere):
        entry: Any = stored[str(i)]
        count = sum(chunk.sizes.numel() for chunk in entry.chunks)
        assert count == prod(shape), f"{shape} {where}: {count} elements were written"
    whole = {name: torch.zeros_like(sources[int(name)]) for name in state}
    load(whole, storage_reader=FileSystemReader(folder))
    assert all(same(tensor, sources[int(name)]) for name, tensor in whole.items()), shape
    save(whole, storage_writer=FileSystemWriter(folder / "stock"))
    load_elsewhere(folder / "stock", sources, everywhere)
    shifts: list[int] = list(range(len(everywhere)))
    if n_shifts is not None:
        shifts = random.Random(str(shape)).sample(shifts, min(n_shifts, len(shifts)))
    for shift in shifts:
        load_elsewhere(folder, sources, everywhere[shift:] + everywhere[:shift])
    return len(everywhere) * len(shifts)


def load_elsewhere(folder: Path, sources: list[torch.Tensor], now: list[Placement | None]) -> None:
    state = {str(i): placed(torch.zeros_like(sources[i]), where) for i, where in enumerate(now)}
    before = {name: spec_of(tensor) for name, tensor in state.items()}
    load(state, storage_reader=FileSystemReader(folder), planner=SPMDLoadPlanner())
    for i, where in enumerate(now):
        assert same(state[str(i)], sources[i]), f"{sources[i].shape} {sources[i].dtype} onto {where}"
        # What was never marked is as open as before: XLA still chooses for it.
        assert spec_of(state[str(i)]) == before[str(i)], f"{sources[i].shape} onto {where}"


def main(kind: str, folder: Path) -> None:
    pairs = {
        shape: one_shape(folder / str(shape), shape, 1 if kind == "sample" else None) for shape in SHAPES
    }
    print(f"{sum(pairs.values())} pairs: {pairs}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    xr.use_spmd()
    # Copies are cut away however small they are: here tensors are.
    xla_sharding.SMALLEST_PART_BYTES = 1  # type: ignore[misc] # a constant elsewhere
    main(sys.argv[1], Path(sys.argv[2]))
