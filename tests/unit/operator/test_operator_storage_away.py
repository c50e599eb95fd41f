"""Test what follows an end for which the training says that its store gave no answer."""

import pytest

from fake_cluster.kubelets import termination_message
from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import Phase

AWAY = termination_message(1, cause="StorageUnavailable", error="TransientStorageError: no answer")


async def test_storage_that_is_away_costs_no_failure_and_is_waited_for_ever_longer() -> None:
    world = World(restarts={"maxFailures": 0, "backoff": {"initialSeconds": 100, "maxSeconds": 300}})
    await world.run_until_settled(rounds=4)
    for wait_s in (100, 200, 300, 300):
        world.now += 1200  # as long as a trainer waits
        for pod in world.pods:
            world.controllers.end_pod(pod, 1, message=AWAY)
        await world.reconcile()
        ended_at = world.now
        while world.causes[-1] is not None:
            await world.run_until_settled(rounds=1)
        assert wait_s <= world.status.attempts[-1].start - ended_at < wait_s + 30
        await world.run_until_settled(rounds=3)
        assert world.phase() is Phase.RUNNING
    assert world.causes == ["StorageUnavailable"] * 4 + [None]
    assert [(e.cause, e.count, e.counted_towards_limit) for e in world.status.restarts.by_cause] == [
        ("StorageUnavailable", 4, 0)
    ]
    assert "no answer" in (world.status.attempts[0].message or "")


@pytest.mark.parametrize(("node_is_lost", "cause"), [(False, "StorageUnavailable"), (True, "NodeFailure")])
async def test_what_other_ranks_fail_with_while_storage_is_away_is_no_failure_either(
    *, node_is_lost: bool, cause: str
) -> None:
    world = World(restarts={"maxFailures": 0})
    await world.run_until_settled(rounds=4)
    if node_is_lost:
        world.lose_node("n2")
    else:
        world.controllers.end_pod(
            world.pods[1], 1, message=termination_message(1, error="SaveError: given up")
        )
    world.now += 1
    world.controllers.end_pod(world.pods[0], 1, message=AWAY)
    await world.run_until_settled(rounds=3)
    assert world.causes[0] == cause
