"""Jobs that Kueue admits, on the machines of a QueuedResource: Kueue alone starts them, and undoes nothing."""

from typing import Any

import pytest

from fake_cluster.job_machines import machines, world_of
from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase

READY = machines()
ABSENT = machines(active=False, joined=False, state="WaitingForResources")
LOST = machines(active=False, joined=False, state="Suspended", tier={"spot": {}})


async def see(world: World, resource: dict[str, Any]) -> None:
    world.cluster.put("queuedresources", resource)
    await world.run_until_settled(rounds=15)
    assert world.controllers.kueue.undone == []


async def queued(resource: dict[str, Any], *, quota: bool = True) -> World:
    world = world_of(resource)
    world.controllers.kueue.install(quota=quota, default_queue="tpus")
    await see(world, resource)
    return world


async def test_a_job_joins_the_queue_once_its_machines_are_there_and_kueue_starts_it() -> None:
    world = await queued(ABSENT, quota=False)
    assert world.jobset is None, "it takes no place in the queue, and no quota, while it couldn't run"
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "WaitingForQueuedResource")
    await see(world, READY)
    assert world.jobset is not None
    assert world.jobset["spec"]["suspend"], "only Kueue starts it"
    assert world.pods == []
    world.controllers.kueue.quota = True
    await see(world, READY)
    assert world.phase() is Phase.RUNNING


@pytest.mark.parametrize("admitted", [True, False])
async def test_machines_that_go_take_a_job_out_of_the_queue_until_they_are_back(*, admitted: bool) -> None:
    world = await queued(READY, quota=admitted)
    assert (world.phase() is Phase.RUNNING) is admitted
    await see(world, LOST)
    assert world.jobset is None, "it holds no quota"
    assert world.pods == []
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "WaitingForQueuedResource")
    world.controllers.kueue.quota = True
    await see(world, READY)
    assert world.phase() is Phase.RUNNING
    assert world.causes == (["SpotPreemption", None] if admitted else [None])
    assert [entry.counted_towards_limit for entry in world.status.restarts.by_cause] == [0] * admitted


async def test_hosts_that_left_for_a_moment_cost_no_place_in_the_queue() -> None:
    world = await queued(READY, quota=False)
    first = world.jobset
    await see(world, machines(joined=False))
    assert first is not None
    assert world.jobset is not None
    assert world.jobset["metadata"]["uid"] == first["metadata"]["uid"]
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "WaitingForNodes")
