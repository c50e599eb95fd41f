"""Jobs that wait, are over or restart all the time cost the API server little."""

from collections import Counter
from typing import Any

import pytest

from fake_cluster.world import World, running
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase

BACKOFF = {"maxFailures": 3, "backoff": {"initialSeconds": 600, "maxSeconds": 3600}}


async def reads_during(world: World, duration_s: float) -> Counter[tuple[str, str]]:
    """Follow the operator's own requeues, and nothing else."""
    world.cluster.reads.clear()
    ends_at = world.now + duration_s
    while world.now < ends_at:
        again_s = await world.reconcile()
        world.now += max(again_s or 600.0, 0.05)
    return world.cluster.reads


async def test_a_job_in_back_off_asks_for_nothing_until_it_is_over() -> None:
    world = await running(restarts=BACKOFF)
    for _ in range(3):
        world.controllers.end_pod(world.pods[0], 1)
        await world.run_until_settled(rounds=4)
    assert world.jobset is not None
    reads = await reads_during(world, 500)
    assert reads["get", "jobsets"] <= 1
    assert reads["LIST", "jobs"] + reads["LIST", "pods"] + reads["list", "jobs"] == 0
    world.cluster.remove("jobsets", "default", "lm")
    world.controllers.sync()
    await world.reconcile()
    assert {verb for verb, _ in await reads_during(world, 20)} <= {"get"}
    await reads_during(world, 200)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING, "it went on by its own requeue"


async def test_the_wait_for_jobset_is_looked_at_ever_less_often() -> None:
    world = await running()
    world.controllers.disrupt(world.pods[0], "EvictionByEvictionAPI")
    world.controllers.end_pod(world.pods[0], 143)
    reads = await reads_during(world, 600)
    assert 10 <= reads["get", "jobsets"] <= 30, "JobSet does nothing here: once each 5 s would be 120 times"


async def test_a_job_that_is_over_asks_for_nothing() -> None:
    world = await running(spot=True, restarts={"maxDisruptions": 0})
    world.preempt()
    await world.run_until_settled()
    assert world.phase() is Phase.FAILED
    assert world.jobset is None
    assert await reads_during(world, 3600) == Counter()


@pytest.mark.parametrize("has_run", [False, True])
async def test_a_refused_job_asks_for_nothing_until_its_spec_changes(*, has_run: bool) -> None:
    refusal: dict[str, Any] = {"ttlSecondsAfterFinished": "soon"}
    world = await running() if has_run else World(**refusal)
    world.edit(**refusal)
    if has_run:
        world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
    await world.run_until_settled()
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "UnreadableSpec")
    assert world.jobset is None
    reads = await reads_during(world, 3600)
    assert reads["get", "jobsets"] <= 7, "at a resync, and then to be sure"
