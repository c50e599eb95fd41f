"""Test that what the cloud announced to a machine is the cause of the end that came, and costs nothing."""

import pytest

from fake_cluster.kubelets import termination_message
from fake_cluster.world import World

SHUTDOWN, DRAIN, TAINT = "TerminationByKubelet", "EvictionByEvictionAPI", "DeletionByTaintManager"


async def find_cause(reason: str, announced: str, *, pod_reason: str | None = None) -> str:
    """Let a pod on a Spot machine be disrupted after its trainer heard an announcement; returns the attempt's cause."""
    world = World(spot=True)
    await world.run_until_settled(rounds=4)
    pod = world.pods[0]
    if pod_reason is not None:
        pod["status"]["reason"] = pod_reason
    world.controllers.disrupt(pod, reason)
    said = termination_message(75, notice="sigterm", cause=announced)
    world.controllers.end_pod(world.pods[0], 75, message=said)
    await world.run_until_settled()
    first = world.status.attempts[0]
    assert [(entry.cause, entry.counted_towards_limit) for entry in world.status.restarts.by_cause] == [
        (first.cause, 0)
    ]
    return str(first.cause)


@pytest.mark.parametrize("announced", ["Maintenance", "SpotPreemption"])
@pytest.mark.parametrize("reason", [SHUTDOWN, DRAIN, TAINT, "NewInKubernetes2"])
async def test_it_is_the_cause_however_kubernetes_ends_the_pod(reason: str, announced: str) -> None:
    assert await find_cause(reason, announced) == announced


async def test_a_pod_that_makes_room_for_others_is_not_ended_by_the_cloud() -> None:
    assert await find_cause("PreemptionByScheduler", "Maintenance") == "SchedulerPreemption"
    assert await find_cause(SHUTDOWN, "Maintenance", pod_reason="Evicted") == "Eviction"
