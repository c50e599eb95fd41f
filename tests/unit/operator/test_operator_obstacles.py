"""Test that an accepted job that can't start says so, and what to look at."""

import pytest

from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase

CONTAINER = {"name": "trainer", "image": "trainer:1"}


async def test_a_gang_without_pods_says_where_to_look_after_half_a_minute() -> None:
    world = World()
    await world.reconcile()
    world.now += 2
    again_s = await world.reconcile()
    assert world.condition("Running") == (ConditionStatus.FALSE, "Starting")
    assert again_s is not None
    world.now += 30
    await world.reconcile()
    assert world.condition("Running") == (ConditionStatus.FALSE, "NoPods")
    (claim,) = [c for c in world.status.conditions if c.type == "Running"]
    describe = "kubectl -n default describe"
    assert f"{describe} jobset lm; {describe} jobs -l stepkeeper.dev/job-name=lm" in claim.message
    assert world.events.count("NoPods") == 1
    assert await world.record_writes(rounds=3) == []
    await world.run_until_settled(rounds=3)
    assert world.phase() is Phase.RUNNING
    assert world.events.count("NoPods") == 1


def lacks_pods(*, running: int, made: int) -> tuple[str, str]:
    """Reason and message of a job on two hosts of whose pods not all are made."""
    found = "" if made == 0 else f" {made} of 2 exist,"
    said = f"{running} of 2 pods run,{found} and {'none' if made == 0 else 'no other'} was made for 30 s"
    return "NoPods", said


def running_condition(world: World) -> tuple[str, str]:
    (claim,) = [c for c in world.status.conditions if c.type == "Running"]
    return claim.reason, claim.message


async def test_a_gang_of_which_only_some_pods_are_made_says_where_to_look() -> None:
    """A quota has room for one of two, say."""
    world = World()
    world.controllers.jobs.most_pods = 1
    await world.run_until_settled(rounds=2)
    assert running_condition(world) == ("Starting", "1 of 2 pods run")
    again_s = await world.reconcile()
    assert again_s is not None
    world.now += again_s
    await world.reconcile()
    reason, message = running_condition(world)
    said, _, where = message.partition(". The events of its JobSet and Jobs say why: ")
    assert (reason, said) == lacks_pods(running=1, made=1)
    assert where.startswith("kubectl -n default describe jobset lm; ")
    assert world.events.count("NoPods") == 1
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
        assert running_condition(world) == ("Starting", f"{n_made} of 4 pods run")
    assert "NoPods" not in world.events


async def test_a_pod_that_is_missing_for_a_moment_long_after_the_start_is_no_obstacle() -> None:
    """Its Job says within seconds that it has failed, or makes another one."""
    world = World()
    await world.run_until_settled(rounds=3)
    world.now += 3600
    name = world.pods[0]["metadata"]["name"]
    world.cluster.remove("pods", "default", name)
    again_s = await world.reconcile()
    assert running_condition(world) == ("Starting", "1 of 2 pods run")
    assert again_s is not None
    world.now += again_s - 1
    await world.reconcile()
    assert "NoPods" not in world.events
    world.now += 1
    await world.reconcile()
    reason, message = running_condition(world)
    assert reason == "NoPods"
    assert message.startswith(lacks_pods(running=1, made=1)[1])


async def test_what_a_pod_waits_for_is_said_before_the_pods_that_are_not_made() -> None:
    """JobSet makes the others of a slice only once the first has its node."""
    world = World()
    world.controllers.jobs.most_pods = 1
    world.controllers.gone.add("n1")
    await world.run_until_settled(rounds=2)
    (pod,) = world.pods
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node"}
    world.cluster.put("pods", pod | {"status": pod["status"] | {"conditions": [unscheduled]}})
    world.now += 60
    await world.reconcile()
    name = pod["metadata"]["name"]
    assert running_condition(world) == (
        "Unschedulable",
        f"0 of 2 pods run; {name} waits: Unschedulable: no node",
    )
    assert "NoPods" not in world.events


async def test_pods_that_are_done_and_gone_are_not_missed() -> None:
    world = World()
    await world.run_until_settled(rounds=3)
    done, other = world.pods
    world.controllers.end_pod(done, 0)
    world.controllers.sync()
    world.cluster.remove("pods", "default", done["metadata"]["name"])
    waiting = [{"name": "trainer", "state": {}}]
    world.cluster.put("pods", other | {"status": {"phase": "Pending", "containerStatuses": waiting}})
    world.controllers.gone.add(other["spec"]["nodeName"])
    await world.reconcile()
    world.now += 60
    await world.reconcile()
    assert running_condition(world) == ("Starting", "0 of 2 pods run")


@pytest.mark.parametrize("kept", [0, 1, 2])
async def test_pods_that_are_done_are_counted_once_whether_they_still_exist_or_not(kept: int) -> None:
    world = World(placement={"hosts": {"count": 4}})
    await world.run_until_settled(rounds=4)
    *done, missing, _running = list(world.pods)
    for pod in done:
        world.controllers.end_pod(pod, 0)
    world.controllers.sync()
    for pod in [*done[kept:], missing]:
        world.cluster.remove("pods", "default", pod["metadata"]["name"])
    again_s = await world.reconcile()
    assert running_condition(world) == ("Starting", "1 of 4 pods run")
    assert again_s is not None
    world.now += 30
    await world.reconcile()
    reason, message = running_condition(world)
    assert reason == "NoPods"
    assert message.startswith(f"1 of 4 pods run, {1 + kept} of 4 exist, and no other was made for 30 s")


@pytest.mark.parametrize(
    "label", ["batch.kubernetes.io/job-name", "jobset.sigs.k8s.io/job-index", "controller-uid"]
)
async def test_a_label_that_job_and_jobset_give_is_refused(label: str) -> None:
    template = {"metadata": {"labels": {label: "x"}}, "spec": {"containers": [CONTAINER]}}
    world = World(template=template)
    await world.run_until_settled(rounds=2)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "ReservedLabel")
    assert world.jobset is None
