"""Test that a pod which was told to end and doesn't is named, with what to do, whoever waits for it."""

import pytest

from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.facts.raw import render_time

STUCK = "PodStuck"


def message(world: World) -> str:
    return next((c.message for c in world.status.conditions if c.type == STUCK), "")


def wedge(world: World, name: str) -> None:
    """Let the kubelet of the node end no pod any more, though the node stays Ready."""
    world.controllers.stuck.add(name)


def not_ready(world: World, name: str) -> None:
    node = world.cluster.objects["nodes", None, name]
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": render_time(world.now)}
    world.cluster.put("nodes", node | {"status": {"conditions": [ready]}})


async def failed_beside_a_wedged_one() -> World:
    """Make a job of which one pod failed, and the other is told to end on a node that ends nothing."""
    world = World()
    await world.run_until_settled(rounds=4)
    wedge(world, "n2")
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled(rounds=2)
    return world


async def pass_time(world: World, seconds: int) -> None:
    world.now += seconds
    await world.run_until_settled(rounds=2)


async def test_a_pod_that_does_not_end_on_a_ready_node_is_named_once_with_what_to_do() -> None:
    world = await failed_beside_a_wedged_one()
    pod = next(raw["metadata"]["name"] for raw in world.pods if raw["spec"]["nodeName"] == "n2")
    assert world.condition(STUCK) is None
    again_s = await world.reconcile()
    assert again_s is not None
    assert again_s < 100
    await pass_time(world, 100)
    assert world.condition(STUCK) == (ConditionStatus.TRUE, "StillTerminating")
    for words in (
        f"pod {pod} on node n2",
        "2027-01-15T09:00:",
        "n2 is Ready",
        f"describe pod {pod}",
        "--force",
    ):
        assert words in message(world)
    assert world.events.count(STUCK) == 1
    assert b'stepkeeper_pod_stuck{job="lm",namespace="default"} 1.0' in world.metrics.render()
    assert await world.record_writes(rounds=3) == []
    world.controllers.stuck.clear()
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.condition(STUCK) == (ConditionStatus.FALSE, "NoneStuck")
    assert world.events.count(STUCK) == 1
    assert b'stepkeeper_pod_stuck{job="lm",namespace="default"} 0.0' in world.metrics.render()


async def test_a_pod_that_does_not_end_on_a_node_that_is_not_ready_is_named_too() -> None:
    world = await failed_beside_a_wedged_one()
    not_ready(world, "n2")
    await pass_time(world, 100)
    assert world.condition(STUCK) == (ConditionStatus.TRUE, "NodeNotReady")
    assert "n2 is not Ready" in message(world)


async def test_a_pod_on_a_silent_node_is_named_while_the_operator_cannot_give_it_up() -> None:
    world = await failed_beside_a_wedged_one()
    for name in ("n2", "n3"):
        world.lose_node(name)
    await pass_time(world, 100)
    assert world.condition(STUCK) == (ConditionStatus.TRUE, "NodeSilent")
    assert "2 of 4 nodes" in message(world)


async def test_a_pod_of_a_lost_node_that_is_given_up_in_time_is_not_stuck() -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    world.lose_node("n2")
    for _ in range(30):
        await pass_time(world, 5)
    assert world.causes == ["NodeFailure", None]
    assert world.condition(STUCK) is None


@pytest.mark.parametrize("change", ["suspend", "edit", "end"])
async def test_it_is_named_whatever_waits_for_it(change: str) -> None:
    world = World(restarts={"maxFailures": 0})
    await world.run_until_settled(rounds=4)
    wedge(world, "n2")
    if change == "suspend":
        world.edit(suspend=True)
    elif change == "edit":
        world.edit(template={"spec": {"containers": [{"name": "trainer", "image": "trainer:2"}]}})
    else:
        world.controllers.end_pod(world.pods[0], 1)
        world.controllers.sync()
        jobset = world.jobset
        assert jobset is not None
        await world.run_until_settled(rounds=2)
    await world.run_until_settled(rounds=4)
    await pass_time(world, 100)
    assert world.condition(STUCK) == (ConditionStatus.TRUE, "StillTerminating")


async def test_a_pod_that_keeps_its_machine_after_the_jobs_end_is_named() -> None:
    world = World(restarts={"maxFailures": 0, "fatalExitCodes": [3]})
    await world.run_until_settled(rounds=4)
    wedge(world, "n2")
    world.controllers.end_pod(world.pods[0], 3)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.FAILED
    await pass_time(world, 100)
    assert world.condition(STUCK) == (ConditionStatus.TRUE, "StillTerminating")
    assert world.events.count(STUCK) == 1
    world.controllers.stuck.clear()
    await world.run_until_settled()
    assert world.condition(STUCK) == (ConditionStatus.FALSE, "NoneStuck")
