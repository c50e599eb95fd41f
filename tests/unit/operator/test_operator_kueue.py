"""Test what the operator does with jobs whose JobSets Kueue manages, and what it leaves to Kueue."""

from typing import Any

import pytest
from typing_extensions import override

from fake_cluster.cluster import FakeCluster
from fake_cluster.stories import play, table
from fake_cluster.world import World
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import job_key
from stepkeeper_operator.cluster.resources import WORKLOADS, Resource
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.facts.jobset import read_jobset
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.startup import Operator
from stepkeeper_operator.training_jobs.observed import Observed


class WithoutKueue(FakeCluster):
    """A cluster whose API server doesn't know Workloads until `installed`."""

    installed = False

    @override
    async def list_uids(
        self, resource: Resource, label_selector: str, *, namespace: str | None = None
    ) -> frozenset[str]:
        if resource is WORKLOADS and not self.installed:
            raise ApiError(404, "the server could not find the requested resource")
        return await super().list_uids(resource, label_selector, namespace=namespace)


QUEUE = {"kueue.x-k8s.io/queue-name": "tpus"}


def queued(*, quota: bool = True, default_queue: str | None = None, **spec: Any) -> World:
    world = World(**spec)
    world.controllers.kueue.install(quota=quota, default_queue=default_queue)
    if default_queue is None:
        raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
        world.cluster.put("checkpointedtrainingjobs", raw | {"metadata": raw["metadata"] | {"labels": QUEUE}})
    return world


def check_writes(world: World, *verbs: str) -> None:
    """Check what was done to JobSets, and that Kueue had to undo none of it."""
    found = [write.verb for write in world.cluster.writes if write.plural == "jobsets"]
    assert found == list(verbs)
    assert world.controllers.kueue.undone == []


@pytest.mark.parametrize("default_queue", [None, "default"])
@pytest.mark.parametrize("restart", ["", "restart, "])
async def test_a_job_without_quota_is_queued_in_kueues_words_and_left_alone(
    default_queue: str | None, restart: str
) -> None:
    world = queued(quota=False, default_queue=default_queue)
    await play(world, f"run, {restart}run 20, phase Queued, condition QuotaReserved False/WaitingForQuota")
    await play(world, "message QuotaReserved insufficient unused quota, events Queued 1")
    check_writes(world, "create")
    await play(world, "rests, quota, run, phase Running, condition QuotaReserved True/QuotaReserved")


@pytest.mark.parametrize("is_watched", [True, False])
async def test_an_eviction_is_a_queue_preemption_with_a_save_and_the_job_resumes(*, is_watched: bool) -> None:
    world = await play(queued(restarts={"maxFailures": 0}), "run 6, phase Running, report 5 100, look")
    await play(world, "stop 10 75" if is_watched else "late workloads, stop 10 75")
    world.controllers.kueue.evict("Preempted", "Preempted to accommodate a workload with priority 100")
    await play(world, "run 20, causes QueuePreemption")
    if is_watched:
        assert "accommodate a workload with priority 100" in (world.status.attempts[-1].message or "")
    await play(world, "deliver, run 2, latest 7 120, phase Queued")
    await play(world, "quota, run, phase Running, causes QueuePreemption -, jobsets 1")
    check_writes(world, "create")


async def test_workloads_are_watched_where_kueue_is_there_also_if_it_comes_later() -> None:
    cluster = WithoutKueue(lambda: 0.0)
    operator = Operator(OperatorSettings(identity="a"), cluster)
    assert not await operator._look_for_kueue()
    assert WORKLOADS not in [kind.resource for kind in operator._kinds]
    cluster.installed = True
    assert await operator._look_for_kueue()
    assert WORKLOADS in [kind.resource for kind in operator._kinds]
    assert not await operator._look_for_kueue()
    off = Operator(OperatorSettings(identity="a", kueue_enabled=False), cluster)
    assert not await off._look_for_kueue()


@table(
    "labels, managed_by, owned, is_queued",
    {
        "nothing": ({}, None, False, False),
        "its queue": (QUEUE, None, False, True),
        "managedBy of Kueue": ({}, "kueue.x-k8s.io/multikueue", False, True),
        "managedBy of JobSet": ({}, "jobset.sigs.k8s.io/jobset-controller", False, False),
        "a Workload that it owns": ({}, None, True, True),
    },
)
def test_the_jobset_tells_who_manages(
    labels: dict[str, str], managed_by: str | None, *, owned: bool, is_queued: bool
) -> None:
    meta = {"namespace": "default", "name": "lm", "uid": "js", "labels": labels}
    jobset = read_jobset({"metadata": meta, "spec": {"managedBy": managed_by}})
    owner = {"kind": "JobSet", "name": "lm", "uid": "js", "controller": True}
    raw = {"metadata": {"namespace": "default", "name": "w", "uid": "w", "ownerReferences": [owner]}}
    cache = Cache()
    if owned:
        assert cache.record(WORKLOADS, raw) == (job_key("default", "lm"),)
    assert Observed(jobset=jobset, workload=cache.get_workload("js")).is_queued is is_queued


async def test_starts_that_kueue_takes_back_before_all_pods_run_cost_nothing() -> None:
    world = queued(quota=False, restarts={"maxStartsWithoutCheckpoint": 2, "maxDisruptions": 0})
    for _ in range(4):
        world.controllers.gone.add("n2")  # so that one pod finds no node
        await play(world, "quota, run 6")
        assert [pod["status"]["phase"] for pod in world.pods] == ["Running", "Pending"]
        world.controllers.kueue.evict("PodsReadyTimeout", "Exceeded the PodsReady timeout default/lm")
        await world.run_until_settled(rounds=6)
    await play(world, "phase Queued, attempts 0, costs, starts 0, events StartWithdrawn 4")
    await play(world, "message QuotaReserved PodsReadyTimeout")
    world.controllers.gone.clear()
    await play(world, "quota, run, phase Running, causes -")


async def test_a_jobset_without_a_queue_that_is_suspended_as_it_is_made_is_left_to_who_did_it() -> None:
    world = World()

    def suspend(plural: str, body: dict[str, Any]) -> dict[str, Any]:
        return body | {"spec": body["spec"] | {"suspend": True}} if plural == "jobsets" else body

    world.cluster.admission = suspend
    await play(world, "run 20, phase Queued, condition QuotaReserved Unknown/NoWorkload")
    check_writes(world, "create")
    assert world.jobset is not None
    spec = world.jobset["spec"] | {"suspend": False}
    world.cluster.put("jobsets", world.jobset | {"spec": spec})
    await play(world, "run, phase Running")


@pytest.mark.parametrize("default_queue", [None, "default"])
@pytest.mark.parametrize("quota", [True, False])
async def test_an_unreadable_job_that_is_to_be_suspended_leaves_its_queue(
    default_queue: str | None, *, quota: bool
) -> None:
    world = await play(queued(quota=quota, default_queue=default_queue), "run 6")
    world.edit(placement="here", suspend=True)
    await play(world, "run 20, gone, pods 0")
    check_writes(world, "create", "delete")
