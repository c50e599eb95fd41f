"""A state that is built like the last one is not planned again; one that differs in anything is."""

from typing import Any

import pytest
import torch

from stepkeeper.errors import SaveError
from stepkeeper.save.snapshot import Region, SnapshotTaker
from stepkeeper.save.snapshot.plan import SnapshotPlan
from stepkeeper.save.snapshot.take import _RegionFiller
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
