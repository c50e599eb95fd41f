"""Test that only objects of the job's own controllers count, whatever labels others have."""

from itertools import permutations
from typing import Any

import pytest

from fake_cluster.stories import play, run_job, table
from fake_cluster.world import World
from stepkeeper.contract import ExitCode
from stepkeeper_operator.cache.cache import Cache


def copied(pod: dict[str, Any], **meta: Any) -> dict[str, Any]:
    """Make a fenced pod with the same labels that doesn't belong to the Job."""
    ended = {"exitCode": int(ExitCode.FENCED), "reason": "Error"}
    status = {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": {"terminated": ended}}]}
    labels = pod["metadata"]["labels"]
    base = {"name": "copy", "namespace": "default", "labels": labels, "uid": "copy"}
    base["creationTimestamp"] = pod["metadata"]["creationTimestamp"]
    return {"metadata": base | meta, "spec": pod["spec"], "status": status}


@table(
    "meta",
    {
        "another namespace": ({"namespace": "evil"},),
        "a copy for debugging": ({},),
        "a Job of somebody": ({"ownerReferences": [{"uid": "another", "controller": True}]},),
    },
)
async def test_a_pod_with_the_jobs_labels_that_is_not_the_jobs_ends_nothing(meta: dict[str, Any]) -> None:
    world = await run_job()
    owners = world.pods[0]["metadata"]["ownerReferences"]
    copy = copied(world.pods[0], **meta)
    if meta.get("namespace"):
        copy["metadata"]["ownerReferences"] = owners
    world.cluster.put("pods", copy)
    await play(world, "look, phase Running, causes -")
    assert len(world.cache.list_pods(world.job.metadata.uid)) == 2


KINDS = ("checkpointedtrainingjobs", "jobsets", "jobs", "pods")


@pytest.mark.parametrize("order", list(permutations(KINDS)))
async def test_what_is_the_jobs_own_is_known_in_whatever_order_it_is_listed(order: tuple[str, ...]) -> None:
    world = await run_job()
    cache = Cache()
    record = dict(
        zip(
            KINDS,
            (cache.record_training_job, cache.record_jobset, cache.record_batch_job, cache.record_pod),
            strict=True,
        )
    )
    for plural in order:
        for raw in world.cluster.list_objects(plural):
            record[plural](raw)
    uid = world.job.metadata.uid
    assert len(cache.list_pods(uid)) == 2
    assert [len(record.pods) for record in cache.list_evidence(uid)] == [2]


async def test_a_pod_that_is_gone_before_its_job_is_known_is_evidence_all_the_same() -> None:
    story = "late jobs, run 2, preempt, run 3, deliver, run, causes SpotPreemption -"
    await play(World(spot=True), story)


async def orphaned() -> World:
    """Delete the JobSet and leave its Jobs."""
    world = await play(await run_job(), "remove jobsets")
    for job in world.cluster.list_objects("jobs"):
        world.cluster.put("jobs", job | {"metadata": job["metadata"] | {"ownerReferences": []}})
    return world


async def test_no_second_gang_is_made_while_a_jobs_or_pods_of_the_first_are_there() -> None:
    world = await orphaned()
    for _ in range(3):
        assert await world.reconcile() == 5
        world.now += 5
    await play(world, "gone, message Running an earlier JobSet left Job lm-w-0")
    command = "kubectl -n default delete jobsets,jobs,pods -l stepkeeper.dev/job-name=lm"
    assert world.message("Running").endswith(command)
    await play(world, "wait 3600, rests")  # pods whose Job is there are that one's to delete
    await play(world, "remove jobs lm-w-0, look, gone, rests")
    for pod in world.pods:
        world.cluster.remove("pods", "default", pod["metadata"]["name"])
    await play(world, "wait 5, run 4, phase Running")


async def test_leftovers_that_are_gone_unnoticed_are_not_waited_for() -> None:
    world = await play(await orphaned(), "look")
    world.cluster.objects = {
        place: raw for place, raw in world.cluster.objects.items() if place[0] not in {"jobs", "pods"}
    }
    await play(world, "run 4, phase Running")


async def test_no_second_gang_is_made_beside_one_that_no_watch_has_told_of() -> None:
    """JobSet restarted its pods, and was deleted, while our watches were broken."""
    world = await play(await run_job(), "late pods")
    pods = world.pods
    world.cluster.put("pods", pods[0] | {"metadata": pods[0]["metadata"] | {"name": "later", "uid": "later"}})
    await play(world, "remove jobsets, remove jobs lm-w-0")
    for pod in pods:
        world.cluster.remove("pods", "default", pod["metadata"]["name"])
    await play(world, "look, wait 5, look, wait 5, look, gone")
    await play(world, "message Running an earlier JobSet left a Pod that no watch has reported yet")
    await play(world, "deliver, remove pods later, run 4, phase Running")
