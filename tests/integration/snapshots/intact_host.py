"""CPU tensors and DTensors, stepped in place at once after save_async: python intact_host.py RANK WORLD_SIZE FOLDER."""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch does not list it
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from stepkeeper import CheckpointManager

RANK, WORLD_SIZE, FOLDER = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])


def new_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    return {
        "plain": torch.randn(1000, 300),
        "turned": torch.randn(40, 50).t(),
        "every second": torch.randn(64, 64)[::2, ::2],
        "lazy": torch.randn(30, dtype=torch.complex64).conj(),
        "rows": distribute_tensor(torch.randn(1001, 70), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.randn(30, 501), mesh, [Shard(1)]),
        "copies": distribute_tensor(torch.randn(200, 200), mesh, [Replicate()]),
        **{f"small.{index}": torch.randn(3) for index in range(200)},
    }


def locals_of(state: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in state.items():
        yield name, (tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def main() -> None:
    store = FileStore(str(FOLDER / "meet"), WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=WORLD_SIZE)
    state = new_state()
    manager = CheckpointManager(str(FOLDER / "root"), 10**6)
    expected: dict[int, dict[str, torch.Tensor]] = {}
    for step in (1, 2, 3):
        expected[step] = {name: tensor.resolve_conj().clone() for name, tensor in locals_of(state)}
        manager.save_async(step, state, force=True)
        for _, tensor in locals_of(state):
            tensor.mul_(-1.5).add_(step)
    manager.wait()
    for step, there in expected.items():
        manager.restore(step, state)
        for name, tensor in locals_of(state):
            assert torch.equal(tensor.resolve_conj(), there[name]), (step, name)
    manager.close()
    dist.destroy_process_group()


main()
