"""Test situations on a cluster that no other file tests: docs/operations/situations.md."""

from typing import Any, Final

import pytest

from fake_cluster.stories import Step, play, run_job, stories
from fake_cluster.world import World

PROXY: Final = {"name": "istio-proxy", "image": "proxy"}


def find_jobset(world: World) -> dict[str, Any]:
    assert world.jobset is not None
    return world.jobset


def put_first(world: World, plural: str, raw: dict[str, Any], containers: list[dict[str, Any]]) -> None:
    """Add a container before the others, and a label, as webhooks do."""
    containers.insert(0, PROXY)
    labels = raw["metadata"].get("labels", {}) | {"sidecar": "injected"}
    world.cluster.put(plural, raw | {"metadata": raw["metadata"] | {"labels": labels}})


async def test_what_webhooks_add_restarts_nothing_and_is_not_taken_back() -> None:
    world = await run_job()
    jobset = find_jobset(world)
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    put_first(world, "jobsets", jobset, template["spec"]["containers"])
    for pod in world.pods:
        put_first(world, "pods", pod, pod["spec"]["containers"])
    await play(world, "run, rests, restart, rests, jobsets 1, phase Running")
    assert find_jobset(world)["metadata"]["labels"]["sidecar"] == "injected"
    await play(world, "end 0, run, phase Complete, causes -")


async def test_of_the_job_itself_only_the_status_is_written() -> None:
    """Tools that compare what is applied with what is there find no difference."""
    world = await run_job()
    place = "checkpointedtrainingjobs", "default", "lm"
    before = world.cluster.objects[place]
    await play(
        world, "report 9 90, run, fail, run, evict, run, report 10 100, run, end 0, run, phase Complete"
    )
    verbs = {write.verb for write in world.cluster.writes if write.plural == place[0]}
    assert verbs == {"apply"}, "of the status, by what follows"
    after = world.cluster.objects[place]
    assert after["spec"] == before["spec"]
    for field in ("labels", "annotations", "finalizers", "generation"):
        assert after["metadata"].get(field) == before["metadata"].get(field)


def pause(world: World) -> None:
    jobset = find_jobset(world)
    world.cluster.put("jobsets", jobset | {"spec": jobset["spec"] | {"suspend": True}})


async def scale(world: World, hosts: str) -> None:
    world.edit(placement={"hosts": {"count": int(hosts)}})
    await world.run_until_settled()


OWN: Final[dict[str, Step]] = {
    "scale": scale,
    "pause": pause,
}


@stories(
    {
        "more hosts and fewer": (
            "scale 3, phase Running, pods 3, scale 1, phase Running, pods 1, causes Requested Requested -, "
            "costs Requested=2/0, rests"
        ),
        "a pod of higher priority": (
            "stop 0 75, disrupt 0 PreemptionByScheduler, run, phase Running, causes SchedulerPreemption -, "
            "costs SchedulerPreemption=1/0, latest 7 120"
        ),
        "a NoExecute taint": "disrupt 0 DeletionByTaintManager, run, phase Running, causes NodeFailure -",
        "a JobSet that is suspended by hand": "pause, run, phase Running, resumed, jobsets 1, rests",
        "one whose pods are done then": "end 0, pause, run, phase Complete, causes -",
        "a pod that stays is not one that isn't made": (
            "stick n2, fail, run 2, wait 100, look, wait 400, look, condition PodStuck True/StillTerminating, "
            "events NoPods 0"
        ),
    }
)
async def test_a_running_job_meets(story: str) -> None:
    await play(await run_job(), story, **OWN)


@pytest.mark.parametrize("end", ["end 0, run, phase Complete", "fail, run, phase Failed"])
async def test_nothing_is_made_for_a_job_that_is_over(end: str) -> None:
    world = await run_job(restarts={"maxFailures": 0})
    await play(world, f"{end}, delete jobsets, run, gone, restart, run, gone, pods 0, rests")
    world.cluster.remove("configmaps", "default", "lm-stepkeeper")
    await play(world, "run, gone, rests")
