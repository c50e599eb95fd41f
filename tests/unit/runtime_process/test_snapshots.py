"""A snapshot has each tensor as it was; a state is planned once, and copied on its devices as far as there is room."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from typing_extensions import override

from stepkeeper.dcp.shares import Share
from stepkeeper.errors import DevicesFullError, SaveError
from stepkeeper.save.snapshot import device
from stepkeeper.save.snapshot.plan import SnapshotPlan
from stepkeeper.save.snapshot.region import Region
from stepkeeper.save.snapshot.take import SnapshotTaker, _RegionFiller
from stepkeeper_planners import adapters
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks

ONE = Ranks(rank=0, world_size=1)


def odd_tensors() -> dict[str, torch.Tensor]:
    """Make tensors of all kinds that a copy could mistake for another."""
    return {
        "parameter": torch.nn.Parameter(torch.rand(3, 4)),
        "with a gradient's history": torch.nn.Parameter(torch.rand(3)) * 2,
        "turned": torch.rand(5, 7).t(),
        "every second": torch.rand(10)[::2],
        "spread": torch.rand(1, 4).expand(3, 4),
        "conjugate": torch.rand(4, dtype=torch.complex64).conj(),
        "negative": torch.rand(4, dtype=torch.complex64).conj().imag,
        "without elements": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "large": torch.rand(300, 300),
        "large, turned": torch.rand(300, 200).t(),
        "of two bytes": torch.rand(9).to(torch.bfloat16),
    }


@pytest.mark.parametrize("n_small", [0, 3000])
def test_a_snapshot_has_all_elements_and_none_of_later_ones(
    n_small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(64))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    snapshots, region = SnapshotTaker(ONE), Region()
    small = {f"small {index}": torch.full((1 + index % 5,), float(index)) for index in range(n_small)}
    for _ in range(3):
        tensors = {**odd_tensors(), **small}
        expected = {
            name: tensor.detach().resolve_conj().resolve_neg().clone() for name, tensor in tensors.items()
        }
        snapshot = snapshots.take_snapshot(tensors, region)
        for tensor in tensors.values():
            tensor.data = torch.zeros_like(tensor)
        places = region.view_orders(snapshot.tensors)
        assert [order.fqn for order in snapshot.tensors] == sorted(tensors)
        for order, place in zip(snapshot.tensors, places, strict=True):
            assert torch.equal(place, expected[order.fqn]), order.fqn
            assert not place.requires_grad
        small = {name: tensor + 1 for name, tensor in small.items()}
    region.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_copies_its_parts_of_what_all_ranks_have(rank: int) -> None:
    snapshots, region = SnapshotTaker(Ranks(rank=rank, world_size=2)), Region()
    for number in range(2):
        whole = torch.rand(64, 1024) + number
        state = {"cut": whole, **{f"whole {index}": torch.rand(100) for index in range(8)}}
        snapshot = snapshots.take_snapshot(state, region)
        assert any(order.sizes != order.global_shape for order in snapshot.tensors)
        for order, place in zip(snapshot.tensors, region.view_orders(snapshot.tensors), strict=True):
            bounds = zip(order.offsets, order.sizes, strict=True)
            mine = state[order.fqn][tuple(slice(start, start + size) for start, size in bounds)]
            assert torch.equal(place, mine)
    region.close()


def planned(snapshots: SnapshotTaker, state: dict[str, Any]) -> SnapshotPlan:
    return snapshots._structures.look_up(state).derived


def test_what_grows_is_saved_whole_and_old_places_are_not_used_again() -> None:
    snapshots, region = SnapshotTaker(ONE), Region()
    for size in (3, 700_000, 5):
        tensor, text = torch.arange(size), "t" * size
        snapshot = snapshots.take_snapshot({"w": tensor, "text": text}, region)
        tensor.zero_()
        (place,) = region.view_orders(snapshot.tensors)
        assert torch.equal(place, torch.arange(size))
        (value,) = snapshot.values
        assert region.size_bytes >= value.start + value.length_bytes
    region.close()


def test_elements_that_did_not_come_from_the_devices_fail_the_save() -> None:
    plan = planned(SnapshotTaker(ONE), {"w": torch.ones(4, 3)})
    region = Region()
    region.reserve(plan.tensor_bytes)
    upper, lower = (Box(offsets=(start, 0), sizes=(2, 3)) for start in (0, 2))
    filler = _RegionFiller(plan, region, ["w"])
    with pytest.raises(SaveError, match="w: 12 elements"):
        filler.check_complete()
    filler.put_parts([("w", [(upper, torch.full((2, 3), 1.0))])])
    with pytest.raises(SaveError, match="w: 6 elements"):
        filler.check_complete()
    filler.put_parts([("w", [(lower, torch.full((2, 3), 2.0))])])
    filler.check_complete()
    (place,) = region.view_orders(plan.orders)
    assert place[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
    region.close()


MIB = 1024 * 1024


NAMES = ["a", "b", "c", "d"]


@dataclass
class Size:
    """All of a Cut that is looked at here."""

    device_bytes: int
    size_bytes: int = 0


CUTS: Any = {name: Size(size * MIB) for name, size in zip(NAMES, (100, 400, 300, 200), strict=True)}


class Devices(device.DeviceCopies):
    def __init__(self, budget_bytes: int | None, room_bytes: int) -> None:
        super().__init__(budget_bytes)
        self.room_bytes = room_bytes
        self.kept = False
        self.asked: list[list[str]] = []

    @override
    def _dispatch_copies(self, tensors: Any, clones: Any, fqns: Sequence[str]) -> Any:
        self.asked.append(list(fqns))
        if sum(clones[fqn].device_bytes for fqn in fqns) > self.room_bytes:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
        return list(fqns)

    @override
    def make_copies(self, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Those copies leave at once, unless they are kept."""
        made, rest = super().make_copies(*arguments, timeout_s=timeout_s)
        if made and not self.kept:
            self.release_copies()
        return made, rest


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(is_multi_process_program=lambda: False)
    monkeypatch.setattr(adapters, "xla_pieces", alone, raising=False)


@pytest.mark.parametrize(
    ("budget_mib", "copied"),
    [(0, []), (99, []), (100, ["a"]), (500, ["a", "b"]), (700, ["b", "c"]), (1000, NAMES), (10**6, NAMES)],
)
def test_a_budget_is_kept_and_used_for_large_tensors_first(budget_mib: int, copied: list[str]) -> None:
    made, rest = Devices(budget_mib * MIB, 2**60).make_copies({}, CUTS, NAMES)
    assert cast(Any, made) == copied
    assert sorted([*copied, *rest]) == NAMES


def test_room_is_found_out_by_halves_and_remembered() -> None:
    devices = Devices(None, 450 * MIB)
    made, rest = devices.make_copies({}, CUTS, NAMES)
    # 1000 MiB, then at most 500: a and b, which is still too much, then at most 250.
    assert devices.asked == [NAMES, ["a", "b"], ["d"]]
    assert cast(Any, made) == ["d"]
    assert rest == ["a", "b", "c"]
    devices.make_copies({}, CUTS, NAMES)
    assert devices.asked[3:] == [["d"]]


def test_a_copy_that_fails_behind_the_training_lowers_what_the_next_save_tries() -> None:
    devices = Devices(None, 2**60)
    with pytest.raises(DevicesFullError, match="from the next one on, 524288000 bytes"):
        devices.handle_refusal(RuntimeError("RESOURCE_EXHAUSTED"), CUTS, NAMES)
    assert devices.limit_bytes == 500 * MIB
    devices.handle_refusal(RuntimeError("the program was cancelled"), CUTS, NAMES)
    assert devices.limit_bytes == 500 * MIB


@pytest.mark.parametrize(
    ("budget_bytes", "is_one_of_many", "says"),
    [
        pytest.param(1000 * MIB, False, "smaller device_budget_bytes", id="a given budget is too large"),
        pytest.param(
            None, True, "device_budget_bytes, the same on all", id="alone, it would start another program"
        ),
    ],
)
def test_what_a_process_may_not_change_alone_is_said_to_be_set(
    monkeypatch: pytest.MonkeyPatch, budget_bytes: int | None, is_one_of_many: bool, says: str
) -> None:
    pieces = SimpleNamespace(is_multi_process_program=lambda: is_one_of_many)
    monkeypatch.setattr(adapters, "xla_pieces", pieces, raising=False)
    devices = Devices(budget_bytes, 450 * MIB)
    with pytest.raises(SaveError, match=says) as raised:
        devices.handle_refusal(RuntimeError("RESOURCE_EXHAUSTED"), CUTS, NAMES)
    assert not raised.value.next_save_recovers
    with pytest.raises(SaveError, match=rf"RESOURCE_EXHAUSTED.*{says}"):
        devices.make_copies({}, CUTS, NAMES)
    assert devices.limit_bytes == budget_bytes


@pytest.mark.parametrize("other", [torch.zeros(4), torch.zeros(5, dtype=torch.int32)])
def test_a_planner_that_gives_something_else_is_refused(other: torch.Tensor) -> None:
    chunk = ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([5]))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size([5]))
    item = WriteItem(MetadataIndex("w", chunk.offsets), WriteItemType.TENSOR, tensor_data=data)
    share = Share([item], lambda _item: other)
    with pytest.raises(SaveError, match=r"w: the planner planned float32\[5\], but returned"):
        share[0:20]


def test_copies_that_do_not_leave_in_time_are_no_reason_to_wait_longer() -> None:
    class Staying(threading.Condition):
        @override
        def wait_for(self, predicate: Any, timeout: float | None = None) -> Any:
            return predicate()

    devices = Devices(500 * MIB, 2**60)
    devices.kept = True
    devices.make_copies({}, CUTS, NAMES)
    vars(devices)["_changed"] = Staying()
    with pytest.raises(TimeoutError, match=r"after 7\.0 s"):
        devices.make_copies({}, CUTS, NAMES, timeout_s=7)
    with pytest.raises(SaveError, match="still on the devices"):
        devices.make_copies({}, CUTS, NAMES)
    assert len(devices.asked) == 1
