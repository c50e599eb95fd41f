"""Test that the controllers in memory do what the real ones were seen to do, where stories depend on it."""

from typing import Any

from fake_cluster.world import World
from stepkeeper_operator.facts.raw import condition_of

TWO_SLICES: dict[str, Any] = {"tpu": {"accelerator": "v5p", "topology": "2x2x2", "slices": 2}}


async def running(**spec: Any) -> World:
    world = World(**spec)
    await world.run_until_settled(rounds=4)
    return world


def restarts(world: World) -> int:
    assert world.jobset is not None
    return int(world.jobset.get("status", {}).get("restarts", 0))


def names(world: World) -> set[str]:
    return {pod["metadata"]["name"] for pod in world.pods}


def set_suspend(world: World, *, suspend: bool) -> None:
    assert world.jobset is not None
    world.cluster.put("jobsets", world.jobset | {"spec": world.jobset["spec"] | {"suspend": suspend}})


async def test_a_job_of_two_slices_has_the_pods_of_both_on_nodes_of_their_own() -> None:
    world = await running(placement=TWO_SLICES)
    assert [pod["metadata"]["labels"]["jobset.sigs.k8s.io/job-index"] for pod in world.pods] == list("0011")
    assert len({pod["spec"]["nodeName"] for pod in world.pods}) == 4


async def test_a_failure_in_one_slice_makes_all_pods_anew_once_the_others_have_stopped() -> None:
    world = await running(placement=TWO_SLICES)
    before = names(world)
    world.controllers.kubelets.stop_s = 5
    world.controllers.end_pod(world.pods[0], 1)
    world.controllers.sync()
    assert restarts(world) == 0, "the Job has not failed before its last pod has ended"
    world.now += 5
    for _ in range(4):
        world.controllers.step()
    assert restarts(world) == 1
    assert names(world) <= before, "no new pods beside old ones"
    world.now += 5
    world.controllers.sync()
    assert len(world.pods) == 4
    assert not names(world) & before


async def test_a_jobset_says_that_it_is_suspended_while_its_pods_still_stop() -> None:
    world = await running()
    world.controllers.kubelets.stop_s = 5
    world.controllers.kubelets.stop_code = 1
    set_suspend(world, suspend=True)
    world.controllers.sync()
    assert world.jobset is not None
    assert condition_of(world.jobset, "Suspended")["status"] == "True"
    assert [pod["status"]["phase"] for pod in world.pods] == ["Running", "Running"]
    world.now += 5
    world.controllers.sync()
    assert world.pods == []
    assert restarts(world) == 0, "how pods end that a suspension stops counts for nothing"
    set_suspend(world, suspend=False)
    world.controllers.sync()
    assert len(world.pods) == 2
    assert restarts(world) == 0


async def test_a_failure_that_came_before_a_suspension_is_not_forgotten() -> None:
    world = await running()
    world.controllers.end_pod(world.pods[0], 1)
    set_suspend(world, suspend=True)
    world.controllers.sync()
    assert restarts(world) == 1
    assert world.pods == [], "the next Job is made without pods"


async def test_a_job_that_is_deleted_is_made_anew_at_once_with_the_same_label() -> None:
    world = await running(placement=TWO_SLICES)
    world.controllers.kubelets.stop_s = 5
    before = names(world)
    world.controllers.delete_job("lm-w-0")
    world.controllers.sync()
    assert len(names(world) - before) == 2, "beside its old pods, which still stop"
    assert len(world.pods) == 6
    world.now += 5
    world.controllers.sync()
    assert len(world.pods) == 4
    assert restarts(world) == 0
    assert {pod["metadata"]["labels"]["jobset.sigs.k8s.io/restart-attempt"] for pod in world.pods} == {"0"}


async def test_a_silent_node_loses_its_pods_after_the_time_that_they_tolerate() -> None:
    world = await running()
    lost = world.pods[0]
    world.lose_node(lost["spec"]["nodeName"])
    world.now += 29
    world.controllers.sync()
    assert "deletionTimestamp" not in world.pods[0]["metadata"]
    world.now += 1
    world.controllers.sync()
    assert condition_of(world.pods[0], "DisruptionTarget")["reason"] == "DeletionByTaintManager"
    assert world.pods[0]["status"]["phase"] == "Running"
