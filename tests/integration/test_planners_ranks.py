"""Planners on real groups of ranks: all kinds of tensors in one state, pipeline stages, primed state, even files."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from stepkeeper_planners import prime_optimizer

SCRIPTS = Path(__file__).parent / "planners_ranks"
Place = tuple[str, tuple[int, ...] | None]


def test_all_kinds_in_one_state_on_4_then_3_then_1_ranks(launch: Callable[..., None], tmp_path: Path) -> None:
    launch(SCRIPTS / "mixed.py", 4, tmp_path, "save:ours:a:0", "load:ours:a:4")
    launch(SCRIPTS / "mixed.py", 3, tmp_path, "load:ours:a:4", "save:ours:b:0")
    launch(SCRIPTS / "mixed.py", 1, tmp_path, "load:ours:b:3")


def test_stock_reads_ours_and_ours_reads_stocks_byte_for_byte(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(SCRIPTS / "mixed.py", 4, tmp_path, "save:ours:both-ways-ours:0", "save:stock:both-ways-stock:0")
    launch(SCRIPTS / "mixed.py", 2, tmp_path, "load:stock:both-ways-ours:4", "load:ours:both-ways-stock:4")

    ours, stocks = blobs(tmp_path / "both-ways-ours"), blobs(tmp_path / "both-ways-stock")
    # Stock lists empty shards too.
    assert stocks.keys() - ours.keys() == {("cut.few_of_many", (9, 0))}
    assert ours.keys() <= stocks.keys()
    different = {fqn for fqn, offsets in ours if ours[fqn, offsets] != stocks[fqn, offsets]}
    # Stock writes strides and the conjugate bit, ours the elements. Values are encoded in another way.
    assert {fqn for fqn in different if fqn.startswith(("cut.", "tied.", "plain."))} <= {
        "plain.0",
        "plain.3",
        "plain.4.step",
    }


def blobs(checkpoint: Path) -> dict[Place, bytes]:
    found = {}
    for index, info in FileSystemReader(checkpoint).read_metadata().storage_data.items():
        data = (checkpoint / info.relative_path).read_bytes()
        place = (index.fqn, None if index.offset is None else tuple(index.offset))
        found[place] = data[info.offset : info.offset + info.length]
    return found


def test_ranks_are_those_of_the_group(launch: Callable[..., None], tmp_path: Path) -> None:
    launch(SCRIPTS / "groups.py", 3, tmp_path)


@pytest.mark.smoke
def test_stages_that_have_optimizers_of_their_own_give_them_all_of_torchs_names(
    launch: Callable[..., None], tmp_path: Path
) -> None:
    launch(SCRIPTS / "optimizers.py", 2, tmp_path, "stages")


@pytest.mark.parametrize("scenario", ["ddp", "compiled_ddp", "fsdp2", "fsdp1", "fsdp1_original"])
def test_an_optimizer_of_a_wrapped_module_is_named_as_torch_names_it(
    launch: Callable[..., None], tmp_path: Path, scenario: str
) -> None:
    launch(SCRIPTS / "optimizers.py", 2, tmp_path, scenario)


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
