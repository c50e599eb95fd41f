"""Test that only objects of the job's own controllers count, whatever labels others have."""

from itertools import permutations
from typing import Any

import pytest

from fake_cluster.world import World, running
from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.conditions import Phase
from stepkeeper_operator.cache.cache import Cache


def copied(pod: dict[str, Any], **meta: Any) -> dict[str, Any]:
    """Make a fenced pod with the same labels that doesn't belong to the Job."""
    ended = {"exitCode": int(ExitCode.FENCED), "reason": "Error"}
    status = {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": {"terminated": ended}}]}
    labels = pod["metadata"]["labels"]
    base = {"name": "copy", "namespace": "default", "labels": labels, "uid": "copy"}
    base["creationTimestamp"] = pod["metadata"]["creationTimestamp"]
    return {"metadata": base | meta, "spec": pod["spec"], "status": status}


@pytest.mark.parametrize("name", ["another namespace", "a copy for debugging", "a Job of somebody"])
async def test_a_pod_with_the_jobs_labels_that_is_not_the_jobs_ends_nothing(name: str) -> None:
    world = await running()
    owners = world.pods[0]["metadata"]["ownerReferences"]
    meta: dict[str, Any] = {
        "another namespace": {"namespace": "evil", "ownerReferences": owners},
        "a copy for debugging": {},
        "a Job of somebody": {"ownerReferences": [{"uid": "another", "controller": True}]},
    }[name]
    world.cluster.put("pods", copied(world.pods[0], **meta))
    await world.reconcile()
    assert world.phase() is Phase.RUNNING
    assert world.causes == [None]
    assert len(world.cache.list_pods(world.job.metadata.uid)) == 2


KINDS = ("checkpointedtrainingjobs", "jobsets", "jobs", "pods")


@pytest.mark.parametrize("order", list(permutations(KINDS)))
async def test_what_is_the_jobs_own_is_known_in_whatever_order_it_is_listed(order: tuple[str, ...]) -> None:
    world = await running()
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
    world = World(spot=True)
    world.delay_watches("jobs")
    await world.run_until_settled(rounds=2)
    world.preempt()
    await world.run_until_settled(rounds=3)
    world.deliver_watches()
    await world.run_until_settled()
    assert world.causes == ["SpotPreemption", None]


async def orphaned() -> World:
    """Delete the JobSet and leave its Jobs."""
    world = await running()
    world.cluster.remove("jobsets", "default", "lm")
    for job in world.cluster.list_objects("jobs"):
        world.cluster.put("jobs", job | {"metadata": job["metadata"] | {"ownerReferences": []}})
    return world


async def test_no_second_gang_is_made_while_a_jobs_or_pods_of_the_first_are_there() -> None:
    world = await orphaned()
    for _ in range(3):
        assert await world.reconcile() == 5
        world.now += 5
    assert world.jobset is None
    assert "Job lm-w-0 of an earlier JobSet is still there" in world.message("Running")
    world.now += 3600
    assert await world.record_writes(rounds=3) == [], "pods whose Job is there are that one's to delete"
    world.cluster.remove("jobs", "default", "lm-w-0")
    await world.reconcile()
    assert world.jobset is None
    assert await world.record_writes(rounds=3) == []
    for pod in world.pods:
        world.cluster.remove("pods", "default", pod["metadata"]["name"])
    world.now += 5
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING


async def test_leftovers_that_are_gone_unnoticed_are_not_waited_for() -> None:
    world = await orphaned()
    await world.reconcile()
    world.cluster.objects = {
        place: raw for place, raw in world.cluster.objects.items() if place[0] not in {"jobs", "pods"}
    }
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING


async def test_no_second_gang_is_made_beside_one_that_no_watch_has_told_of() -> None:
    """JobSet restarted its pods, and was deleted, while our watches were broken."""
    world = await running()
    world.delay_watches("pods")
    pods = world.pods
    world.cluster.put("pods", pods[0] | {"metadata": pods[0]["metadata"] | {"name": "later", "uid": "later"}})
    world.cluster.remove("jobsets", "default", "lm")
    world.cluster.remove("jobs", "default", "lm-w-0")
    for pod in pods:
        world.cluster.remove("pods", "default", pod["metadata"]["name"])
    for _ in range(3):
        await world.reconcile()
        world.now += 5
    assert world.jobset is None
    assert "a Pod that no watch has reported yet" in world.message("Running")
    world.deliver_watches()
    world.cluster.remove("pods", "default", "later")
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
