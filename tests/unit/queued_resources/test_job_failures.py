"""Failures of a job before its machines are lost: which of them are its own."""

from typing import Any

from fake_cluster.job_machines import change, running
from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import Phase

SPOT: dict[str, Any] = {"spot": {}}
GONE: dict[str, Any] = {"tier": SPOT, "active": False, "joined": False, "state": "Suspended"}


def run_out_of_memory(world: World) -> None:
    world.controllers.end_pod(world.pods[0], 137, reason="OOMKilled")


async def test_a_pod_over_its_memory_limit_just_before_the_loss_stays_a_failure() -> None:
    """Lost peers and chips make trainers fail with errors of any kind, but not that."""
    world = await running(tier=SPOT)
    world.controllers.gone.add(world.pods[1]["spec"]["nodeName"])
    run_out_of_memory(world)
    await world.run_until_settled(rounds=3)
    await change(world, **GONE)
    assert world.causes == ["ApplicationError"]
    assert "CauseCorrected" not in world.events


async def test_a_pod_over_its_memory_limit_that_is_seen_together_with_the_loss_is_a_failure() -> None:
    world = await running(tier=SPOT)
    run_out_of_memory(world)
    await change(world, **GONE)
    assert world.causes[0] == "ApplicationError"


async def test_a_last_failure_that_no_loss_can_explain_ends_the_job_at_once() -> None:
    world = await running(tier=SPOT, restarts={"maxFailures": 0})
    run_out_of_memory(world)
    await world.run_until_settled(rounds=3)
    assert world.phase() is Phase.FAILED


async def test_a_failure_long_before_the_loss_stays_a_failure() -> None:
    world = await running(tier=SPOT)
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled(rounds=3)
    world.now += 130
    await change(world, **GONE)
    assert world.causes == ["ApplicationError", "SpotPreemption"]


async def test_a_job_that_fails_for_good_on_its_machines_ends_once_no_loss_has_been_seen() -> None:
    world = await running(tier=SPOT, restarts={"maxFailures": 0})
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled(rounds=3)
    ended = world.status.attempts[-1].end
    assert ended is not None
    world.now = ended + 119
    await world.run_until_settled(rounds=0)
    assert world.phase() is Phase.RESTARTING
    world.now = ended + 121
    await world.run_until_settled(rounds=1)
    assert world.phase() is Phase.FAILED
