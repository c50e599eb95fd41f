"""A state that is built like the last one is not planned again; one that differs in anything is."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from stepkeeper.errors import DevicesFullError, SaveError
from stepkeeper.save.report import SaveClock
from stepkeeper.save.snapshot import Region, SnapshotTaker, transfer_snapshot
from stepkeeper.save.snapshot.device import DeviceCopies
from stepkeeper.save.snapshot.plan import SnapshotPlan
from stepkeeper.save.snapshot.summary import StateSummary
from stepkeeper.save.snapshot.take import Snapshot, _RegionFiller
from stepkeeper.time_limits import TimeLimits
from stepkeeper_planners import adapters
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks

ONE = Ranks(rank=0, world_size=1)


def planned(snapshots: SnapshotTaker, state: dict[str, Any]) -> SnapshotPlan:
    return snapshots._structures.look_up(state).derived


def state(**changed: Any) -> dict[str, Any]:
    return {"w": torch.ones(4, 3), "b": torch.zeros(2), "step": 1, **changed}


@pytest.mark.parametrize(
    "changed",
    [
        {"w": torch.ones(3, 4)},
        {"w": torch.ones(4, 3, dtype=torch.float64)},
        {"more": torch.ones(1)},
        {"b": 2},
        {"note": "x"},
    ],
)
def test_a_plan_is_kept_until_the_state_is_built_otherwise(changed: dict[str, Any]) -> None:
    snapshots = SnapshotTaker(ONE)
    first = planned(snapshots, state())
    assert planned(snapshots, state(w=torch.zeros(4, 3), step=2)) is first
    other = planned(snapshots, state(**changed))
    assert other is not first
    assert {write.fqn for write in other.writes} == {
        name for name, value in state(**changed).items() if isinstance(value, torch.Tensor)
    }


def test_the_first_save_after_a_start_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots, region = SnapshotTaker(Ranks(rank=0, world_size=2)), Region()
    snapshots.prepare(state())
    monkeypatch.setattr("stepkeeper.save.snapshot.plan.plan_save", None)
    assert [order.fqn for order in snapshots.take_snapshot(state(step=2), region).tensors] == ["w"]
    region.close()


def test_values_that_decide_who_writes_what_are_part_of_the_structure() -> None:
    snapshots = SnapshotTaker(Ranks(rank=0, world_size=2))
    first = planned(snapshots, state(text="x"))
    assert planned(snapshots, state(text="xyz")) is first
    assert planned(snapshots, state(text="x" * 100_000)) is not first


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


def test_memory_is_there_ahead_of_the_first_save() -> None:
    region = Region()
    region.reserve(1_000_000)
    region.view_tensor(0, torch.uint8, (3,)).fill_(7)
    region.populate(1_000_000)
    region.populate(10**9)
    assert region.view_tensor(0, torch.uint8, (4,)).tolist() == [7, 7, 7, 0]
    region.close()
    region.populate(1_000_000)


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


def test_copies_of_which_nothing_came_fail_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(wait_until_computed=lambda pieces: None, move_to_host=lambda batch: iter(()))
    monkeypatch.setattr(adapters, "xla_pieces", nothing, raising=False)
    plan = planned(SnapshotTaker(ONE), {"w": torch.ones(4, 3)})
    region = Region()
    region.reserve(plan.tensor_bytes)
    snapshot = Snapshot(
        plan=plan,
        values=(),
        summary=StateSummary(),
        copied=("w",),
        copies=DeviceCopies(None),
    )
    with pytest.raises(SaveError, match="w: 12 elements"):
        snapshot.move_copies(region)
    region.close()


def test_elements_of_a_part_that_two_ranks_write_come_to_where_this_one_writes_its_own() -> None:
    """A box that is none of the plan's is met with those that it overlaps."""
    plan = planned(SnapshotTaker(ONE), {"w": torch.ones(4, 3)})
    region = Region()
    region.reserve(plan.tensor_bytes)
    filler = _RegionFiller(plan, region, ["w"])
    columns = [Box(offsets=(0, column), sizes=(4, 1)) for column in range(3)]
    filler.put_parts([("w", [(box, torch.full((4, 1), float(box.offsets[1]))) for box in columns])])
    filler.check_complete()
    (place,) = region.view_orders(plan.orders)
    assert place.tolist() == [[0.0, 1.0, 2.0]] * 4
    region.close()


def test_what_another_rank_writes_is_let_go() -> None:
    """A program of several processes brings all ranks all that they hold, also whole batches of another one's."""
    ranks = Ranks(rank=1, world_size=2)
    plan = planned(SnapshotTaker(ranks), {"w": torch.ones(4, 3), "v": torch.ones(4, 3)})
    ((fqn, mine),) = plan.writes_by_fqn.items()
    other = "v" if fqn == "w" else "w"
    region = Region()
    region.reserve(plan.tensor_bytes)
    filler = _RegionFiller(plan, region, [fqn])
    whole = Box.whole((4, 3))
    filler.put_parts([(other, [(whole, torch.full((4, 3), 7.0))])])
    filler.put_parts([(fqn, [(whole, torch.full((4, 3), 2.0))])])
    filler.check_complete()
    ((index, _),) = mine
    assert region.view_orders(plan.orders)[index].tolist() == [[2.0] * 3] * 4
    region.close()


class Copy:
    """In place of a piece on the devices."""

    size_bytes = 64 * 1024 * 1024
    fqn = "w"


def test_what_has_come_from_the_devices_is_counted_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    boxes = iter([Box(offsets=(0, 0), sizes=(2, 3)), Box(offsets=(2, 0), sizes=(2, 3))])

    def move(batch: list[Copy]) -> Iterator[Any]:
        counts.append(snapshot.moved_bytes)
        while batch:
            yield batch.pop(), [(next(boxes), torch.ones(2, 3))]

    moving = SimpleNamespace(wait_until_computed=lambda _: None, move_to_host=move)
    monkeypatch.setattr(adapters, "xla_pieces", moving, raising=False)
    plan, region = planned(SnapshotTaker(ONE), {"w": torch.ones(4, 3)}), Region()
    region.reserve(plan.tensor_bytes)
    snapshot = Snapshot(
        plan=plan,
        values=(),
        summary=StateSummary(),
        on_device=cast(Any, [Copy(), Copy()]),
        copied=("w",),
        copies=DeviceCopies(None),
    )
    snapshot.move_copies(region)
    assert [*counts, snapshot.moved_bytes] == [0, Copy.size_bytes, 2 * Copy.size_bytes]
    region.close()


def test_devices_that_turn_out_to_be_full_keep_nothing_and_are_asked_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def move(batch: object) -> Iterator[Any]:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
        yield

    monkeypatch.setattr(
        adapters,
        "xla_pieces",
        SimpleNamespace(
            wait_until_computed=lambda _: None, move_to_host=move, is_multi_process_program=lambda: False
        ),
        raising=False,
    )
    plan = planned(SnapshotTaker(ONE), {"w": torch.ones(4, 3)})
    plan = replace(plan, clones=cast(Any, {"w": SimpleNamespace(device_bytes=256 * 1024 * 1024)}))
    copies = DeviceCopies(None)
    pieces = cast(Any, [Copy(), Copy(), Copy()])
    monkeypatch.setattr(copies, "_dispatch_copies", lambda *_: list(pieces))
    made, _ = copies.make_copies({}, plan.clones, ["w"])
    there = [weakref.ref(piece) for piece in pieces]
    snapshot = Snapshot(
        plan=plan,
        values=(),
        summary=StateSummary(),
        on_device=made,
        copied=("w",),
        copies=copies,
    )
    region = Region()
    region.reserve(plan.tensor_bytes)
    pieces.clear()
    kept_until_its_turn = None
    try:
        transfer_snapshot(snapshot, region, SaveClock(), TimeLimits())
    except DevicesFullError as error:
        kept_until_its_turn = error
    assert "134217728 bytes" in str(kept_until_its_turn)
    assert [piece() for piece in there] == [None, None, None]
    assert copies.limit_bytes == 128 * 1024 * 1024
    monkeypatch.undo()
    # The next one doesn't wait for what is gone.
    assert copies.make_copies({}, plan.clones, ["w"]) == ([], ["w"])
    region.close()


def test_numbers_that_ranks_compare_are_found_with_each_plan() -> None:
    snapshots, region = SnapshotTaker(Ranks(rank=0, world_size=2)), Region()
    kinds = torch.ones(3), torch.arange(3), torch.arange(1, 4), torch.ones(3)
    contents = [snapshots.take_snapshot({"w": tensor}, region).summary.contents for tensor in kinds]
    region.close()
    assert [sorted(each) for each in contents] == [[], ["w"], ["w"], []]
    assert contents[1] != contents[2]
