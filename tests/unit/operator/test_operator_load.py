"""Jobs that wait, are over or restart all the time cost the API server little."""

from collections import Counter

from fake_cluster.stories import play, run_job
from fake_cluster.world import World

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
    world = await play(await run_job(restarts=BACKOFF), "fail, run 4, fail, run 4, fail, run 4")
    assert world.jobset is not None
    reads = await reads_during(world, 500)
    assert reads["get", "jobsets"] <= 1
    assert reads["LIST", "jobs"] + reads["LIST", "pods"] + reads["list", "jobs"] == 0
    await play(world, "remove jobsets, act, look")
    assert {verb for verb, _ in await reads_during(world, 20)} <= {"get"}
    await reads_during(world, 200)
    await play(world, "run, phase Running")  # it continued by its own requeue


async def test_the_wait_for_jobset_is_looked_at_ever_less_often() -> None:
    reads = await reads_during(await play(await run_job(), "evict"), 600)
    assert 10 <= reads["get", "jobsets"] <= 30, "JobSet does nothing here: once each 5 s would be 120 times"


async def test_a_job_that_is_over_asks_for_nothing() -> None:
    world = await run_job(spot=True, restarts={"maxDisruptions": 0})
    await play(world, "preempt, run, phase Failed, gone")
    assert await reads_during(world, 3600) == Counter()


async def test_a_refused_job_asks_for_nothing_until_its_spec_changes() -> None:
    world = await play(World(), "edit ttl soon, run, condition Accepted False/UnreadableSpec, gone")
    reads = await reads_during(world, 3600)
    assert reads["get", "jobsets"] <= 7, "at a resync, and then to be sure"
