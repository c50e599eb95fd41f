"""What each kind of tensor is described as, or refused, and which rank and device holds which part of it."""

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
from stepkeeper_planners.adapters.op_sharding import Tiling, device_owners, parse_sharding
from stepkeeper_planners.adapters.placements import (
    DimShard,
    Placements,
    RankMesh,
    check_ascending_ranks,
    chunks_on_mesh,
)
from stepkeeper_planners.errors import LayoutError, UnsupportedShardingError
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.cover import check_cover
from stepkeeper_planners.geometry.layout import Chunk, Owner, Ranks
from stepkeeper_planners.loading.saved_shardings import PresentSharding, SavedShardings, choose_shardings
from stepkeeper_planners.state.tree import flatten_state


def box(*pairs: tuple[int, int]) -> Box:
    return Box(offsets=tuple(start for start, _ in pairs), sizes=tuple(size for _, size in pairs))


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ([box((0, 2), (0, 3))], "hold 6 of 12"),
        ([box((0, 3), (0, 3)), box((2, 2), (0, 3))], "overlap"),
        ([box((0, 4), (0, 4))], "not inside"),
        ([box((0, 4))], "not inside"),
    ],
)
def test_gaps_overlaps_and_strays_are_named(boxes: list[Box], words: str) -> None:
    with pytest.raises(LayoutError, match=f"layer.w.*{words}"):
        check_cover("layer.w", (4, 3), boxes)


@pytest.mark.parametrize(
    ("shape", "ranks", "placements"),
    [
        ((2,), (1, 0), (DimShard(dim=0),)),
        ((2, 2), (0, 1, 3, 2), (None, DimShard(dim=0))),
    ],
)
def test_a_tensor_is_not_cut_along_ranks_that_do_not_ascend(
    shape: tuple[int, ...], ranks: tuple[int, ...], placements: Placements
) -> None:
    with pytest.raises(UnsupportedShardingError, match=r"mesh \[.*full_tensor\(\).*in ascending order"):
        check_ascending_ranks(RankMesh(shape=shape, ranks=ranks), placements)


@pytest.mark.parametrize(
    ("placements", "words"),
    [
        ((None,), "1 placements for a mesh of 2 dimensions"),
        ((DimShard(dim=2), None), "dimension 2 of a tensor of 2 dimensions"),
        ((DimShard(dim=0, split_factor=2), None), "several separate pieces. redistribute"),
        ((DimShard(dim=0, split_factor=3), DimShard(dim=0)), r"split factor 3.* into \[2\]"),
    ],
    ids=[
        "one placement for each mesh dimension",
        "a dimension that isn't there",
        "a strided shard over nothing",
        "a strided shard over something else",
    ],
)
def test_what_says_nothing_of_who_holds_what_is_refused(placements: Placements, words: str) -> None:
    with pytest.raises(UnsupportedShardingError, match=words):
        chunks_on_mesh(RankMesh(shape=(2, 2), ranks=(0, 1, 2, 3)), placements, (4, 4))


def owner(rank: int, local_index: int) -> Owner:
    return Owner(rank=rank, local_index=local_index)


ALIKE = {0: (owner(0, 0), owner(1, 0)), 1: (owner(0, 1), owner(1, 1))}
SHARED = {0: (owner(0, 0),), 1: (owner(0, 1),), 4: (owner(1, 0),), 5: (owner(1, 1),)}


@pytest.mark.parametrize(
    ("local", "devices", "n_processes", "ranks", "owners"),
    [
        pytest.param([0, 1], [0, 1], 1, (0, 1), {0: (owner(0, 0),), 1: (owner(0, 1),)}, id="one process"),
        pytest.param([0, 1], [0, 1], 1, (0, 2), ALIKE, id="programs side by side"),
        pytest.param([0, 1], [0, 1], 1, (1, 2), ALIKE, id="the second of these"),
        pytest.param([0, 1], [0, 1, 4, 5], 2, (0, 2), SHARED, id="processes of one program"),
        pytest.param([4, 5], [0, 1, 4, 5], 2, (1, 2), SHARED, id="the second of these"),
    ],
)
def test_programs_side_by_side_are_copies_and_processes_of_one_share_its_devices_out(
    local: list[int], devices: list[int], n_processes: int, ranks: tuple[int, int], owners: Any
) -> None:
    rank, world_size = ranks
    assert device_owners(local, devices, n_processes, Ranks(rank=rank, world_size=world_size)) == owners


@pytest.mark.parametrize(
    ("local", "ranks"),
    [
        ([0, 1], Ranks(rank=1, world_size=2)),
        ([0, 2], Ranks(rank=0, world_size=2)),
        ([0, 1], Ranks(rank=0, world_size=4)),
    ],
    ids=["ranks in another order", "devices not in blocks", "more ranks than processes"],
)
def test_what_doesnt_fit_is_refused_with_the_numbers(local: list[int], ranks: Ranks) -> None:
    with pytest.raises(
        UnsupportedShardingError, match=rf"rank {ranks.rank} of {ranks.world_size}.*2 processes"
    ):
        device_owners(local, [0, 1, 2, 3], 2, ranks)


@pytest.mark.parametrize("text", ["", "{replicated}", "{devices=[1,1,4]0,1,2,3 last_tile_dim_replicate}"])
def test_whole_on_every_device(text: str) -> None:
    assert parse_sharding("w", text, 2) is None


@pytest.mark.parametrize(
    ("text", "counts", "groups"),
    [
        ("{devices=[2,2]0,1,2,3}", (2, 2), ((0,), (1,), (2,), (3,))),
        ("{devices=[2,1,2]2,3,0,1 last_tile_dim_replicate}", (2, 1), ((2, 3), (0, 1))),
        ("{devices=[2,2]<=[4]}", (2, 2), ((0,), (1,), (2,), (3,))),
        ("{devices=[2,2]<=[2,2]T(1,0)}", (2, 2), ((0,), (2,), (1,), (3,))),
        ("{devices=[4,1]0,1,2,3 metadata={op_name=x}}", (4, 1), ((0,), (1,), (2,), (3,))),
    ],
)
def test_tiles(text: str, counts: tuple[int, ...], groups: tuple[tuple[int, ...], ...]) -> None:
    assert parse_sharding("w", text, 2) == Tiling(counts=counts, groups=groups)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{manual}", "MANUAL"),
        ("{maximal device=2}", "maximal"),
        ("{unknown}", "unknown"),
        ("{devices=[2,2]0,1,2}", "2 dimensions"),
        ("{devices=[4]0,1,2,3}", "2 dimensions"),
        ("{{devices=[2,2]0,1,2,3}, {replicated}}", "mark_sharding"),
        ("{devices=[2,1,2]0,1,2,3 last_tile_dims={manual}}", "manual"),
    ],
)
def test_what_says_nothing_of_devices_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(UnsupportedShardingError, match=f"(?s)layer.w.*{words}"):
        parse_sharding("layer.w", text, 2)


ROWS, COLUMNS = "{devices=[4,1]0,1,2,3}", "{devices=[1,4]0,1,2,3}"
HALVES = "{devices=[2,2]0,1,2,3 last_tile_dim_replicate}"
REPLICATED = "{replicated}"
SAVED = SavedShardings(n_devices=4, by_name={"w": ROWS, "head": ROWS, "b": HALVES, "step": REPLICATED})


def present(w: str, head: str = ROWS, *, b: str = "", inferred: str = "") -> dict[str, PresentSharding]:
    texts = {"w": (w, 2), "head": (head, 2), "b": (b, 1), "step": ("", 0), "unsaved": ("", 1)}
    return {
        fqn: PresentSharding(text=text, ndim=ndim, inferred=fqn == inferred)
        for fqn, (text, ndim) in texts.items()
    }


SHARDINGS = {
    "what is open is as it was saved": (present(ROWS), 4, {"b": HALVES, "step": REPLICATED}),
    "what is marked keeps its mark": (present(ROWS, b=REPLICATED), 4, {"step": REPLICATED}),
    "what priming inferred is as it was saved": (
        present(ROWS, b=REPLICATED, inferred="b"),
        4,
        {"b": HALVES, "step": REPLICATED},
    ),
    "a tensor is divided in another way: all stays open": (present(COLUMNS), 4, {}),
    "nothing is divided any more: all stays open": (present(REPLICATED, REPLICATED), 4, {}),
    "nothing is marked: all is as it was saved": (
        present("", ""),
        4,
        {"w": ROWS, "head": ROWS, "b": HALVES, "step": REPLICATED},
    ),
    "other devices, nothing is marked: all stays open": (present("", ""), 8, {}),
    "other devices: all stays open": (present(REPLICATED, REPLICATED), 8, {}),
}


@pytest.mark.parametrize(("now", "n_devices", "wanted"), SHARDINGS.values(), ids=SHARDINGS)
def test_open_shardings_are_the_saved_ones_in_the_same_layout(
    now: dict[str, PresentSharding], n_devices: int, wanted: dict[str, str]
) -> None:
    assert choose_shardings(SAVED, now, n_devices) == wanted


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


def two_rows() -> torch.Tensor:
    """Rows 3 and 0 of a tensor of 4 x 2; a row of padding lies between them."""
    rows = torch.tensor([[6.0, 7.0], [-1.0, -1.0], [0.0, 1.0]])
    vars(rows).update(
        global_shape=(4, 2),
        global_offsets=((3, 0), (0, 0)),
        local_offsets=((0, 0), (2, 0)),
        local_sizes=((1, 2), (1, 2)),
    )
    return rows


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
    "tensor", [torch.arange(12.0).reshape(3, 4).t(), torch.arange(10)[::3], torch.tensor([1 + 2j]).conj()]
)
def test_the_shard_of_a_plain_tensor_has_bare_elements_in_their_order(tensor: torch.Tensor) -> None:
    (shard,) = adapters.local_shards(tensor)
    assert shard.is_contiguous()
    assert not shard.is_conj()
    assert torch.equal(shard, tensor)
