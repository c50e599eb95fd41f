"""Test what follows an end for which the training says that its store gave no answer."""

from fake_cluster.kubelets import termination_message
from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase

AT_ONCE = {"backoff": {"initialSeconds": 0, "maxSeconds": 0}}


def lack_storage(world: World) -> None:
    """End the pods as trainers do whose store has given no answer for as long as they can wait."""
    for pod in world.pods:
        said = termination_message(1, cause="StorageUnavailable", error="TransientStorageError: no answer")
        world.controllers.end_pod(pod, 1, message=said)


async def test_storage_that_is_away_costs_no_failure_and_is_waited_for_ever_longer() -> None:
    world = World(restarts={"maxFailures": 0, "backoff": {"initialSeconds": 100, "maxSeconds": 300}})
    await world.run_until_settled(rounds=4)
    for wait_s in (100, 200, 300, 300):
        world.now += 1200  # as long as a trainer waits
        lack_storage(world)
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


async def test_storage_that_stays_away_suspends_the_job_for_a_person() -> None:
    world = World(restarts={"maxFailures": 0, "maxStartsWithoutCheckpoint": 4} | AT_ONCE)
    for _ in range(4):
        await world.run_until_settled(rounds=6)
        assert world.phase() is Phase.RUNNING
        lack_storage(world)
    await world.run_until_settled()
    assert world.causes == ["StorageUnavailable"] * 4
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "NoNewCheckpoint")


async def test_what_other_ranks_fail_with_while_storage_is_away_is_no_failure_either() -> None:
    world = World(restarts={"maxFailures": 0})
    await world.run_until_settled(rounds=4)
    world.controllers.end_pod(world.pods[0], 1, message=termination_message(1, error="SaveError: given up"))
    world.now += 1
    said = termination_message(1, cause="StorageUnavailable", error="TransientStorageError: no answer")
    world.controllers.end_pod(world.pods[1], 1, message=said)
    await world.run_until_settled(rounds=3)
    assert world.causes[0] == "StorageUnavailable"


async def test_a_lost_node_says_more_than_that_storage_was_away() -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    world.lose_node("n2")
    said = termination_message(1, cause="StorageUnavailable", error="TransientStorageError: no answer")
    world.controllers.end_pod(world.pods[0], 1, message=said)
    await world.run_until_settled(rounds=3)
    assert world.causes[0] == "NodeFailure"
