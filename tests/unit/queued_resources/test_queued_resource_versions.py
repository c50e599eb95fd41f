"""Test what is known of maintenance and autocheckpoint, whatever version made a resource and whichever answers."""

from typing import Any

import pytest

from fake_cluster.resource_world import ResourceWorld
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudMaintenance

REFUSED, DOWN = "PERMISSION_DENIED", "UNAVAILABLE"
GUARANTEED: dict[str, Any] = {"tier": {"guaranteed": {}}}


def lose_v2alpha1(world: ResourceWorld, code: str) -> None:
    world.cloud.inject_error("ListNodes", code, None, version=ApiVersion.V2ALPHA1)


async def active(error: str = "", **spec: Any) -> ResourceWorld:
    world = ResourceWorld(**spec)
    if error:
        lose_v2alpha1(world, error)
    await world.run(12)
    assert world.condition("NodesJoined") == ("True", "AllHostsJoined")
    return world


def announce(world: ResourceWorld, *, in_s: int, lasts_s: int | None = 600) -> int:
    start = int(world.now) + in_s
    end = None if lasts_s is None else start + lasts_s
    window = CloudMaintenance(type="SCHEDULED", status="PENDING", window_start=start, window_end=end)
    world.cloud.set_nodes(maintenance=window)
    return start


async def test_maintenance_of_spot_machines_is_told_though_v2_made_them() -> None:
    world = await active()
    assert world.status.api_version == "v2"
    assert world.status.autocheckpoint == "Off"
    assert world.condition("MaintenanceScheduled") == ("False", "NotAnnounced")
    start = announce(world, in_s=3600)
    await world.run(4)
    assert world.condition("MaintenanceScheduled") == ("True", "Pending")
    assert world.status.next_maintenance_time == start


async def test_where_only_v2_answers_nobody_can_know() -> None:
    world = await active(REFUSED)
    announce(world, in_s=3600)
    await world.run(4)
    assert world.condition("MaintenanceScheduled") == ("Unknown", "NotTold")
    message = next(c.message for c in world.status.conditions if c.type == "MaintenanceScheduled")
    assert "PERMISSION_DENIED" in message
    assert world.status.autocheckpoint == ""
    assert world.condition("Degraded") == ("False", "AsExpected")
    assert await world.record_writes() == []


@pytest.mark.parametrize("lasts_s", [600, None])
async def test_a_window_that_is_not_told_any_more_is_not_over(lasts_s: int | None) -> None:
    world = await active()
    start = announce(world, in_s=3600, lasts_s=lasts_s)
    await world.run(4)
    n_events = len(world.events)
    lose_v2alpha1(world, REFUSED)
    await world.run(4)
    assert world.condition("MaintenanceScheduled") == ("True", "Pending")
    assert world.status.next_maintenance_time == start
    assert len(world.events) == n_events
    world.now = start + (lasts_s or 0)
    await world.run(4)
    assert world.condition("MaintenanceScheduled") == ("Unknown", "NotTold")
    assert world.status.next_maintenance_time is None
    world.cloud.clear_faults()
    world.cloud.set_nodes(maintenance=None)
    world.now += 300
    await world.run(4)
    assert world.condition("MaintenanceScheduled") == ("False", "NotAnnounced")


async def test_a_short_silence_of_v2alpha1_changes_nothing_and_a_long_one_is_told() -> None:
    world = await active()
    lose_v2alpha1(world, DOWN)
    for _ in range(10):
        world.step(20)
        assert await world.record_writes(2) == []
    await world.run(20)
    assert world.condition("MaintenanceScheduled") == ("Unknown", "NotTold")
    assert world.condition("Active") == ("True", "Active")


async def test_a_mismatch_of_autocheckpoint_stays_known() -> None:
    world = await active(**GUARANTEED)
    assert world.status.autocheckpoint == "On"
    world.cloud.set_nodes(autocheckpoint=False)
    await world.run(4)
    assert world.condition("Degraded") == ("True", "AutocheckpointMismatch")
    lose_v2alpha1(world, REFUSED)
    await world.run(4)
    assert world.condition("Degraded") == ("True", "AutocheckpointMismatch")
    assert world.status.autocheckpoint == "Off"
