"""A state that is built like the last one is not planned again; one that differs in anything is."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from stepkeeper.errors import DevicesFullError, SaveError
from stepkeeper.save.pipeline import _transfer
from stepkeeper.save.report import SaveClock
from stepkeeper.save.snapshot import Region, Snapshots
from stepkeeper.save.snapshot.device import DeviceCopies
from stepkeeper.save.snapshot.plan import Planner
from stepkeeper.save.snapshot.summary import StateSummary
from stepkeeper.save.snapshot.take import Snapshot, _Arrivals
from stepkeeper_planners import adapters
from stepkeeper_planners.geometry.boxes import Box
from stepkeeper_planners.geometry.layout import Ranks
from stepkeeper_planners.saving.known_plan import WrittenShare
from stepkeeper_planners.state.gatherer import Gatherer

ONE = Ranks(rank=0, world_size=1)


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
    planner = Planner(ONE)
    first = planner.plan(Gatherer().gather(state()))
    assert planner.plan(Gatherer().gather(state(w=torch.zeros(4, 3), step=2))) is first
    other = planner.plan(Gatherer().gather(state(**changed)))
    assert other is not first
    assert {write.fqn for write in other.writes} == {
        name for name, value in state(**changed).items() if isinstance(value, torch.Tensor)
    }


def test_the_first_save_after_a_start_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots, region = Snapshots(Ranks(rank=0, world_size=2)), Region()
    snapshots.prepare(state())
    monkeypatch.setattr("stepkeeper.save.snapshot.plan.plan_save", None)
    assert [order.fqn for order in snapshots.take(state(step=2), region).tensors] == ["w"]
    region.close()


def test_values_that_decide_who_writes_what_are_part_of_the_structure() -> None:
    planner = Planner(Ranks(rank=0, world_size=2))
    first = planner.plan(Gatherer().gather(state(text="x")))
    assert planner.plan(Gatherer().gather(state(text="xyz"))) is first
    assert planner.plan(Gatherer().gather(state(text="x" * 100_000))) is not first


def test_what_grows_is_saved_whole_and_old_places_are_not_used_again() -> None:
    snapshots, region = Snapshots(ONE), Region()
    for size in (3, 700_000, 5):
        tensor, text = torch.arange(size), "t" * size
        snapshot = snapshots.take({"w": tensor, "text": text}, region)
        tensor.zero_()
        (place,) = region.places(snapshot.tensors)
        assert torch.equal(place, torch.arange(size))
        (value,) = snapshot.values
        assert region.size_bytes >= value.start + value.length_bytes
    region.close()


def test_memory_is_there_ahead_of_the_first_save() -> None:
    region = Region()
    region.reserve(1_000_000)
    region.tensor(0, torch.uint8, (3,)).fill_(7)
    region.populate(1_000_000)
    region.populate(10**9)
    assert region.tensor(0, torch.uint8, (4,)).tolist() == [7, 7, 7, 0]
    region.close()
    region.populate(1_000_000)


def test_elements_that_did_not_come_from_the_devices_fail_the_save() -> None:
    plan = Planner(ONE).plan(Gatherer().gather({"w": torch.ones(4, 3)}))
    region = Region()
    region.reserve(plan.tensor_bytes)
    upper, lower = (Box(offsets=(start, 0), sizes=(2, 3)) for start in (0, 2))
    arrivals = _Arrivals(plan, region, ["w"])
    with pytest.raises(SaveError, match="w: 12 elements"):
        arrivals.check()
    arrivals.put([("w", [(upper, torch.full((2, 3), 1.0))])])
    with pytest.raises(SaveError, match="w: 6 elements"):
        arrivals.check()
    arrivals.put([("w", [(lower, torch.full((2, 3), 2.0))])])
    arrivals.check()
    (place,) = region.places(plan.orders)
    assert place[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
    region.close()


def test_copies_of_which_nothing_came_fail_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(wait_until_there=lambda pieces: None, move=lambda batch: iter(()))
    monkeypatch.setattr(adapters, "xla_pieces", nothing, raising=False)
    plan = Planner(ONE).plan(Gatherer().gather({"w": torch.ones(4, 3)}))
    region = Region()
    region.reserve(plan.tensor_bytes)
    snapshot = Snapshot(
        plan=plan,
        values=(),
        aliases={},
        key_paths={},
        summary=StateSummary(),
        copied=("w",),
        copies=DeviceCopies(None),
    )
    with pytest.raises(SaveError, match="w: 12 elements"):
        snapshot.transfer(region)
    region.close()


def test_elements_of_a_part_that_two_ranks_write_come_to_where_this_one_writes_its_own() -> None:
    """A box that is none of the plan's is met with those that it overlaps."""
    plan = Planner(ONE).plan(Gatherer().gather({"w": torch.ones(4, 3)}))
    region = Region()
    region.reserve(plan.tensor_bytes)
    arrivals = _Arrivals(plan, region, ["w"])
    columns = [Box(offsets=(0, column), sizes=(4, 1)) for column in range(3)]
    arrivals.put([("w", [(box, torch.full((4, 1), float(box.offsets[1]))) for box in columns])])
    arrivals.check()
    (place,) = region.places(plan.orders)
    assert place.tolist() == [[0.0, 1.0, 2.0]] * 4
    region.close()


def test_what_another_rank_writes_is_let_go() -> None:
    """A program of several processes brings all ranks all that they hold, also whole batches of another one's."""
    ranks = Ranks(rank=1, world_size=2)
    plan = Planner(ranks).plan(Gatherer().gather({"w": torch.ones(4, 3), "v": torch.ones(4, 3)}))
    ((fqn, mine),) = plan.mine.items()
    other = "v" if fqn == "w" else "w"
    region = Region()
    region.reserve(plan.tensor_bytes)
    arrivals = _Arrivals(plan, region, [fqn])
    whole = Box.whole((4, 3))
    arrivals.put([(other, [(whole, torch.full((4, 3), 7.0))])])
    arrivals.put([(fqn, [(whole, torch.full((4, 3), 2.0))])])
    arrivals.check()
    ((index, _),) = mine
    assert region.places(plan.orders)[index].tolist() == [[2.0] * 3] * 4
    region.close()


class Copy:
    """In place of a piece on the devices."""

    size_bytes = 64 * 1024 * 1024


def test_devices_that_turn_out_to_be_full_keep_nothing_and_are_asked_for_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def move(batch: object) -> Iterator[Any]:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
        yield

    monkeypatch.setattr(
        adapters,
        "xla_pieces",
        SimpleNamespace(wait_until_there=lambda _: None, move=move, is_one_program_of_many=lambda: False),
        raising=False,
    )
    plan = Planner(ONE).plan(Gatherer().gather({"w": torch.ones(4, 3)}))
    plan = replace(plan, cuts=cast(Any, {"w": SimpleNamespace(device_bytes=256 * 1024 * 1024)}))
    copies = DeviceCopies(None)
    pieces = cast(Any, [Copy(), Copy(), Copy()])
    monkeypatch.setattr(copies, "_dispatched", lambda *_: list(pieces))
    made, _ = copies.make({}, plan.cuts, ["w"])
    there = [weakref.ref(piece) for piece in pieces]
    snapshot = Snapshot(
        plan=plan,
        values=(),
        aliases={},
        key_paths={},
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
        _transfer(snapshot, region, SaveClock())
    except DevicesFullError as error:
        kept_until_its_turn = error
    assert "134217728 bytes" in str(kept_until_its_turn)
    assert [piece() for piece in there] == [None, None, None]
    assert copies.limit_bytes == 128 * 1024 * 1024
    monkeypatch.undo()
    # The next one doesn't wait for what is gone.
    assert copies.make({}, plan.cuts, ["w"]) == ([], ["w"])
    region.close()


@pytest.mark.parametrize(("more", "told"), [({}, "by the same plan"), ({"w": torch.ones(5, 3)}, "anew")])
def test_a_plan_is_known_again_by_a_new_process(
    more: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Ranks(rank=0, world_size=2)
    before = Planner(two).plan(Gatherer().gather(state()))
    boxes: dict[str, list[Box]] = {}
    for write in before.writes:
        boxes.setdefault(write.fqn, []).append(write.box)
    assert before.digest is not None
    after = Planner(two)
    assert before.digest == Planner(two).plan(Gatherer().gather(state())).digest
    after.recall(WrittenShare(digest=before.digest, boxes=boxes, values=before.values))
    if not more:
        monkeypatch.setattr("stepkeeper.save.snapshot.plan.plan_save", None)
    with caplog.at_level("INFO", "stepkeeper"):
        found = after.plan(Gatherer().gather(state(**more)))
    assert [record.message for record in caplog.records if told in record.message]
    assert (found.writes == before.writes) is not bool(more)
    assert (found.digest == before.digest) is not bool(more)


def test_numbers_that_ranks_compare_are_found_with_each_plan() -> None:
    snapshots, region = Snapshots(Ranks(rank=0, world_size=2)), Region()
    kinds = torch.ones(3), torch.arange(3), torch.arange(1, 4), torch.ones(3)
    contents = [snapshots.take({"w": tensor}, region).summary.contents for tensor in kinds]
    region.close()
    assert [sorted(each) for each in contents] == [[], ["w"], ["w"], []]
    assert contents[1] != contents[2]
