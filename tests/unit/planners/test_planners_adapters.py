"""How each kind of tensor is described, and which are refused, each with its name and what to do."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from stepkeeper_planners import adapters
from stepkeeper_planners.adapters import describe, fill, local_shards
from stepkeeper_planners.errors import UnsupportedShardingError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Chunk, Owner, Ranks, whole_tensor
from stepkeeper_planners.state.tree import flatten_state

RANKS = Ranks(rank=1, world_size=4)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Make a mesh of 2 x 2 ranks, three of which are pretended."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANKS.rank, world_size=RANKS.world_size)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def placed(local: torch.Tensor, mesh: DeviceMesh, *placements: Placement, **more: Any) -> torch.Tensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, **more)


def owners(layout: Any) -> dict[tuple[int, ...], list[int]]:
    return {chunk.box.offsets: [owner.rank for owner in chunk.owners] for chunk in layout.chunks}


def test_a_dtensor_is_where_its_placements_say(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(torch.ones(3, 2), mesh, [Replicate(), Shard(-1)], run_check=False)
    layout = adapters.describe("w", tensor, RANKS)
    assert (layout.dtype, layout.global_shape, layout.complete) == ("float32", (3, 4), True)
    assert owners(layout) == {(0, 0): [0, 2], (0, 2): [1, 3]}
    assert adapters.select_sharded({"w": tensor, "v": torch.ones(2)}) == {"w": tensor}
    (shard,) = adapters.local_shards(tensor)
    assert type(shard) is torch.Tensor
    adapters.fill(tensor, {0: torch.full((3, 2), 5.0)})
    assert torch.equal(tensor.to_local(), torch.full((3, 2), 5.0))


def test_tied_dtensors_are_told_even_where_this_rank_has_no_elements(mesh: DeviceMesh) -> None:
    def empty_part() -> torch.Tensor:
        return placed(torch.empty(0, 2), mesh["tp"], Shard(0), shape=torch.Size((1, 2)), stride=(2, 1))

    one, other = empty_part(), empty_part()
    assert adapters.identity(one) == adapters.identity(one.detach())
    assert adapters.identity(one) != adapters.identity(other)
    assert owners(adapters.describe("w", one, RANKS)) == {(0, 0): [0, 2]}
    adapters.fill(one, {})


TWO_TENSOR: Any = TwoTensor

REFUSED: dict[str, tuple[Callable[[DeviceMesh], Any], str]] = {
    "partial sums": (
        lambda mesh: placed(torch.ones(3), mesh, Partial(), Replicate()),
        r"it is placed as .*one term of a sum .*redistribute\(\)",
    ),
    "a local tensor of another shape": (
        lambda mesh: placed(
            torch.ones(3, 2), mesh, Replicate(), Shard(0), shape=torch.Size((5, 2)), stride=(2, 1)
        ),
        r"rank 1 holds a part of shape \(3, 2\), but the placements imply \(2, 2\)",
    ),
    "ranks that don't ascend": (
        lambda _: placed(torch.ones(3), DeviceMesh("cpu", [2, 1]), Shard(0)),
        r"it is sharded over dimension 0 of the mesh \[2, 1\]",
    ),
    "wrapper subclasses": (
        lambda _: TWO_TENSOR(torch.ones(2), torch.ones(2)),
        r"a TwoTensor is made of other tensors \(a, b\)",
    ),
    "the meta device": (lambda _: torch.ones(2, device="meta"), "meta"),
    "bits": (lambda _: torch.zeros(4, dtype=torch.uint8).view(torch.bits16), "bits16.*view"),
    "a sparse tensor": (lambda _: torch.eye(2).to_sparse(), "sparse"),
    "torch's old ShardedTensor": (
        lambda _: torch.Tensor.__new__(ShardedTensor),
        "ShardedTensor.*fully_shard",
    ),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_stored_is_refused_by_name(
    mesh: DeviceMesh, make: Callable[[DeviceMesh], Any], words: str
) -> None:
    tensors = flatten_state({"a": {"w": make(mesh)}}).tensors
    with pytest.raises(UnsupportedShardingError, match=rf"a\.w: .*{words}"):
        adapters.describe("a.w", tensors["a.w"], RANKS)


def checkpointable(local: torch.Tensor, **attributes: object) -> torch.Tensor:
    for name, value in attributes.items():
        setattr(local, name, value)
    return local


def two_rows() -> torch.Tensor:
    """Rows 3 and 0 of a tensor of 4 x 2; a row of padding lies between them."""
    return checkpointable(
        torch.tensor([[6.0, 7.0], [-1.0, -1.0], [0.0, 1.0]]),
        global_shape=(4, 2),
        global_offsets=((3, 0), (0, 0)),
        local_offsets=((0, 0), (2, 0)),
        local_sizes=((1, 2), (1, 2)),
    )


def test_a_checkpointable_tensor_says_what_this_rank_holds_and_no_more() -> None:
    tensor = two_rows()
    layout = adapters.describe("w", tensor, RANKS)
    assert not layout.complete
    assert layout.global_shape == (4, 2)
    assert layout.chunks == (
        Chunk(box=Box(offsets=(3, 0), sizes=(1, 2)), owners=(Owner(rank=1, local_index=0),)),
        Chunk(box=Box(offsets=(0, 0), sizes=(1, 2)), owners=(Owner(rank=1, local_index=1),)),
    )
    assert [shard.tolist() for shard in adapters.local_shards(tensor)] == [[[6.0, 7.0]], [[0.0, 1.0]]]
    adapters.fill(tensor, {0: torch.full((1, 2), 8.0), 1: torch.full((1, 2), 9.0)})
    assert tensor.tolist() == [[8.0, 8.0], [-1.0, -1.0], [9.0, 9.0]]
    assert adapters.identity(tensor) == adapters.identity(tensor)
    assert adapters.identity(tensor) != adapters.identity(two_rows())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(10)[::3],
        torch.tensor([1 + 2j]).conj(),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, dtype=torch.bfloat16),
    ],
    ids=lambda t: f"{t.dtype}{tuple(t.shape)}",
)
def test_a_plain_tensor_is_read_and_filled(tensor: torch.Tensor) -> None:
    layout = describe("t", tensor, Ranks(rank=1, world_size=3))
    assert layout == whole_tensor(
        "t", str(tensor.dtype)[6:], tuple(tensor.shape), Ranks(rank=0, world_size=3)
    )
    shard = local_shards(tensor)[0]
    assert shard.is_contiguous()
    assert not shard.requires_grad
    assert not shard.is_conj()
    assert torch.equal(shard, tensor)
    other = tensor.detach().clone()
    fill(other, {0: torch.zeros_like(shard)})
    fill(other, {0: shard})
    assert torch.equal(other, tensor)
