"""Test that a job says what holds it up and what to look at: pods that aren't made, and pods that don't end."""

from typing import Any, Final

import pytest

from fake_cluster.stories import condition_of, fail, message_of, run_job
from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.facts.raw import render_time

STARTING: Final = "Starting"
STUCK: Final = "PodStuck"


def running_condition(world: World) -> tuple[str, str]:
    found = condition_of(world, "Running")
    return found.reason, found.message


async def pass_time(world: World, seconds: float) -> None:
    world.now += seconds
    await world.reconcile()


@pytest.mark.parametrize("n_made", [0, 1])
async def test_a_gang_of_which_only_some_pods_are_made_says_where_to_look_after_half_a_minute(
    n_made: int,
) -> None:
    world = World()
    world.controllers.jobs.most_pods = n_made
    await world.run_until_settled(rounds=3)
    assert running_condition(world)[0] == STARTING
    again_s = await world.reconcile()
    assert again_s is not None
    await pass_time(world, again_s)
    reason, message = running_condition(world)
    said = {
        0: "0 of 2 pods run, and none was made for 30 s",
        1: "1 of 2 pods run, 1 of 2 exist, and no other",
    }
    assert reason == "NoPods"
    assert message.startswith(said[n_made])
    describe = "kubectl -n default describe"
    assert f"{describe} jobset lm; {describe} jobs -l stepkeeper.dev/job-name=lm" in message
    assert await world.record_writes(rounds=3) == []
    world.controllers.jobs.most_pods = None
    await world.run_until_settled(rounds=3)
    assert world.phase() is Phase.RUNNING
    assert world.events.count("NoPods") == 1


async def test_pods_that_are_made_one_after_the_other_are_no_obstacle() -> None:
    """Those of a thousand hosts take minutes: only a pause counts."""
    world = World(placement={"hosts": {"count": 4}})
    for n_made in range(1, 4):
        world.controllers.jobs.most_pods = n_made
        await world.run_until_settled(rounds=10)
        assert running_condition(world) == (STARTING, f"{n_made} of 4 pods run")
    assert "NoPods" not in world.events


async def test_a_pod_that_is_missing_for_a_moment_long_after_the_start_is_no_obstacle() -> None:
    """Its Job says within seconds that it has failed, or makes another one."""
    world = await run_job()
    world.now += 3600
    world.cluster.remove("pods", "default", world.pods[0]["metadata"]["name"])
    again_s = await world.reconcile()
    assert again_s is not None
    await pass_time(world, again_s - 1)
    assert running_condition(world) == (STARTING, "1 of 2 pods run")
    await pass_time(world, 1)
    assert running_condition(world)[0] == "NoPods"


async def test_what_a_pod_waits_for_is_said_before_the_pods_that_are_not_made() -> None:
    """JobSet makes the others of a slice only once the first has its node."""
    world = World()
    world.controllers.jobs.most_pods = 1
    world.controllers.gone.add("n1")
    await world.run_until_settled(rounds=2)
    (pod,) = world.pods
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}
    world.cluster.put("pods", pod | {"status": pod["status"] | {"conditions": [unscheduled]}})
    await pass_time(world, 60)
    said = f"0 of 2 pods run; {pod['metadata']['name']} waits: Unschedulable: no node"
    assert running_condition(world) == ("PodWaiting", said)
    waiting = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no image"}}}
    world.cluster.put("pods", pod | {"status": pod["status"] | {"containerStatuses": [waiting]}})
    await pass_time(world, 2)
    assert "ImagePullBackOff" in running_condition(world)[1]
    assert "NoPods" not in world.events


@pytest.mark.parametrize("kept", [0, 1, 2])
async def test_pods_that_are_done_are_counted_once_whether_they_still_exist_or_not(kept: int) -> None:
    world = await run_job(placement={"hosts": {"count": 4}})
    *done, missing, _running = list(world.pods)
    for pod in done:
        world.controllers.end_pod(pod, 0)
    world.controllers.sync()
    for pod in [*done[kept:], missing]:
        world.cluster.remove("pods", "default", pod["metadata"]["name"])
    await world.reconcile()
    assert running_condition(world) == (STARTING, "1 of 4 pods run")
    await pass_time(world, 30)
    reason, message = running_condition(world)
    assert reason == "NoPods"
    assert message.startswith(f"1 of 4 pods run, {1 + kept} of 4 exist, and no other was made for 30 s")


async def with_wedged_node(**restarts: Any) -> World:
    """Run a job on two nodes, of which the kubelet of n2 ends no pod any more, though n2 stays Ready."""
    world = await run_job(restarts=restarts)
    world.controllers.stuck.add("n2")
    return world


def lose_ready(world: World) -> None:
    node = world.cluster.objects["nodes", None, "n2"]
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": render_time(world.now)}
    world.cluster.put("nodes", node | {"status": {"conditions": [ready]}})


async def test_a_pod_that_does_not_end_on_a_ready_node_is_named_once_with_what_to_do() -> None:
    world = await with_wedged_node()
    pod = world.pods[1]["metadata"]["name"]
    fail(world)
    await world.run_until_settled(rounds=2)
    assert world.condition(STUCK) is None
    assert (await world.reconcile() or 100) < 100
    await pass_time(world, 100)
    assert world.condition(STUCK) == (ConditionStatus.TRUE, "StillTerminating")
    for words in (
        f"pod {pod} on node n2",
        "2027-01-15T09:00:",
        "n2 is Ready",
        f"describe pod {pod}",
        "--force",
    ):
        assert words in message_of(world, STUCK)
    assert b'stepkeeper_pod_stuck{job="lm",namespace="default"} 1.0' in world.metrics.render()
    assert await world.record_writes(rounds=3) == []
    world.controllers.stuck.clear()
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.condition(STUCK) == (ConditionStatus.FALSE, "AsExpected")
    assert world.events.count(STUCK) == 1
    assert b'stepkeeper_pod_stuck{job="lm",namespace="default"} 0.0' in world.metrics.render()


@pytest.mark.parametrize(
    ("nodes", "reason", "said"),
    [("not ready", "NodeNotReady", "n2 is not Ready"), ("silent", "NodeSilent", "2 of 4 nodes")],
)
async def test_a_pod_is_stuck_on_a_node_that_is(nodes: str, reason: str, said: str) -> None:
    world = await with_wedged_node()
    fail(world)
    await world.run_until_settled(rounds=2)
    if nodes == "silent":
        for name in ("n2", "n3"):
            world.lose_node(name)  # half of all, so that the operator can't give it up
    else:
        lose_ready(world)
    world.now += 100
    await world.run_until_settled(rounds=2)
    assert world.condition(STUCK) == (ConditionStatus.TRUE, reason)
    assert said in message_of(world, STUCK)


IMAGE: Final = {"spec": {"containers": [{"name": "trainer", "image": "trainer:2"}]}}


@pytest.mark.parametrize("edit", [{"suspend": True}, {"template": IMAGE}, {}])
async def test_a_stuck_pod_is_named_at_a_suspension_an_edit_and_the_jobs_end(edit: dict[str, Any]) -> None:
    world = await with_wedged_node(maxFailures=0, fatalExitCodes=[3])
    world.edit(**edit)
    if not edit:
        fail(world, 3)
    await world.run_until_settled(rounds=4)
    assert edit or world.phase() is Phase.FAILED
    world.now += 100
    await world.run_until_settled(rounds=2)
    assert world.condition(STUCK) == (ConditionStatus.TRUE, "StillTerminating")
    assert world.events.count(STUCK) == 1
    world.controllers.stuck.clear()
    await world.run_until_settled()
    assert world.condition(STUCK) == (ConditionStatus.FALSE, "AsExpected")
