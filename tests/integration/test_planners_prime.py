"""Primed state on DTensor parameters, in a group of one process."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from stepkeeper_planners import prime_optimizer

KINDS: list[type[Optimizer]] = [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def sharded(mesh: DeviceMesh) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    placements: list[list[Placement]] = [[Shard(0)], [Shard(1)], [Replicate()]]
    return [
        torch.nn.Parameter(distribute_tensor(torch.randn(6, 4, generator=generator), mesh, placement))
        for placement in placements
    ]


def made(kind: type[Optimizer], params: list[torch.nn.Parameter]) -> Optimizer:
    hyperparameters: dict[str, Any] = {"lr": 0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
    return kind(params, **hyperparameters)


@pytest.mark.parametrize("kind", KINDS)
def test_state_is_placed_as_a_step_places_it(mesh: DeviceMesh, kind: type[Optimizer]) -> None:
    primed, stepped = sharded(mesh), sharded(mesh)
    optimizer, real = made(kind, primed), made(kind, stepped)
    before = copy.deepcopy([p.detach() for p in primed])
    prime_optimizer(optimizer)
    assert all(p.grad is None for p in primed)
    for p, was in zip(primed, before, strict=True):
        assert torch.equal(p.full_tensor(), was.full_tensor())  # type: ignore[attr-defined] # they are DTensors
    for p in stepped:
        p.grad = torch.ones_like(p)
    real.step()
    for mine, theirs in zip(primed, stepped, strict=True):
        assert optimizer.state[mine].keys() == real.state[theirs].keys()
        for name, want in real.state[theirs].items():
            got = optimizer.state[mine][name]
            assert (type(got), got.shape, got.dtype) == (type(want), want.shape, want.dtype), name
            if isinstance(want, DTensor):
                assert got.placements == want.placements, name
                assert not got.full_tensor().any(), name
