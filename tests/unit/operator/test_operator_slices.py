"""Test that what one slice shows of an end decides nothing that another slice can still explain."""

import pytest

from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import Phase


async def fail_one_slice_beside_a_silent_node() -> World:
    """Let the pods of a slice fail because a node of the other slice is gone, which nobody has seen yet."""
    world = World(
        placement={"tpu": {"accelerator": "v5p", "topology": "2x2x2", "slices": 2}},
        restarts={"maxFailures": 0},
    )
    await world.run_until_settled(rounds=6)
    world.controllers.stuck.add("n4")
    for pod in world.pods[:2]:
        world.controllers.end_pod(pod, 1)
    await world.run_until_settled(rounds=6)
    assert world.jobset is not None
    assert world.jobset["status"]["conditions"][-1]["type"] == "Failed"
    return world


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_slice_that_fails_for_a_node_of_another_that_is_lost_does_not_end_the_job(
    *, restarted: bool
) -> None:
    world = await fail_one_slice_beside_a_silent_node()
    assert world.phase() is Phase.RESTARTING
    world.now += 40
    if restarted:
        world.restart_operator()
    world.lose_node("n4")
    for _ in range(20):
        world.now += 5
        await world.run_until_settled(rounds=2)
    assert world.causes == ["NodeFailure", None]
    assert world.status.restarts.by_cause[0].counted_towards_limit == 0


async def test_a_failure_beside_a_pod_that_does_not_end_is_final_after_two_minutes() -> None:
    world = await fail_one_slice_beside_a_silent_node()
    world.now += world.settings.reattribution_s
    await world.run_until_settled(rounds=2)
    assert world.phase() is Phase.FAILED
    assert world.causes == ["ApplicationError"]


async def test_a_failure_is_final_at_once_where_all_pods_of_all_slices_have_ended() -> None:
    world = World(
        placement={"tpu": {"accelerator": "v5p", "topology": "2x2x2", "slices": 2}},
        restarts={"maxFailures": 0},
    )
    await world.run_until_settled(rounds=6)
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled(rounds=8)
    assert world.phase() is Phase.FAILED
