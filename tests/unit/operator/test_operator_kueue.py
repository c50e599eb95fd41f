"""Test what the operator does with jobs whose JobSets Kueue manages, and what it leaves to Kueue."""

from typing import Any

import pytest
from typing_extensions import override

from fake_cluster.cluster import FakeCluster
from fake_cluster.kubelets import saved_message, training_report
from fake_cluster.world import World
from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import job_key
from stepkeeper_operator.cluster import WORKLOADS, Resource
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.facts import read_jobset
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


def label(world: World, labels: dict[str, str]) -> None:
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.put("checkpointedtrainingjobs", raw | {"metadata": raw["metadata"] | {"labels": labels}})


def queued(*, quota: bool = True, default_queue: str | None = None, **spec: Any) -> World:
    world = World(**spec)
    world.controllers.kueue.install(quota=quota, default_queue=default_queue)
    if default_queue is None:
        label(world, QUEUE)
    return world


async def running(**spec: Any) -> World:
    world = queued(**spec)
    await world.run_until_settled(rounds=6)
    assert world.phase() is Phase.RUNNING
    return world


def writes_of_jobsets(world: World) -> list[str]:
    return [write.verb for write in world.cluster.writes if write.plural == "jobsets"]


@pytest.mark.parametrize("default_queue", [None, "default"])
@pytest.mark.parametrize("restarted", [False, True])
async def test_a_job_without_quota_is_queued_in_kueues_words_and_left_alone(
    default_queue: str | None, *, restarted: bool
) -> None:
    world = queued(quota=False, default_queue=default_queue)
    await world.run_until_settled()
    if restarted:
        world.restart_operator()
    await world.run_until_settled(rounds=20)
    assert world.phase() is Phase.QUEUED
    assert world.condition("QuotaReserved") == (ConditionStatus.FALSE, "WaitingForQuota")
    assert "insufficient unused quota" in world.message("QuotaReserved")
    assert "Queued" in world.events
    assert writes_of_jobsets(world) == ["create"]
    assert world.controllers.kueue.undone == []
    assert await world.record_writes(rounds=3) == []
    world.controllers.kueue.quota = True
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.condition("QuotaReserved") == (ConditionStatus.TRUE, "QuotaReserved")


@pytest.mark.parametrize("is_watched", [True, False])
async def test_an_eviction_is_a_queue_preemption_with_a_save_and_the_job_resumes(*, is_watched: bool) -> None:
    world = await running(restarts={"maxFailures": 0})
    world.receive_report(training_report(sequence=5, step=100))
    await world.reconcile()
    if not is_watched:
        world.delay_watches("workloads")
    kubelets = world.controllers.kubelets
    kubelets.stop_s, kubelets.stop_code = 10, int(ExitCode.SAVED)
    kubelets.stop_message = saved_message(sequence=7, step=120)
    world.controllers.kueue.evict("Preempted", "Preempted to accommodate a workload with priority 100")
    await world.run_until_settled(rounds=20)
    assert world.causes == ["QueuePreemption"]
    if is_watched:
        assert "accommodate a workload with priority 100" in (world.status.attempts[-1].message or "")
    world.deliver_watches()
    await world.run_until_settled(rounds=2)
    assert world.latest == (7, 120)
    assert world.phase() is Phase.QUEUED
    world.controllers.kueue.quota = True
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["QueuePreemption", None]
    assert world.status.operator.job_sets == 1
    assert writes_of_jobsets(world) == ["create"]


async def test_a_job_that_is_suspended_leaves_its_queue_and_kueue_undoes_nothing() -> None:
    world = await running()
    world.edit(suspend=True)
    await world.run_until_settled()
    assert world.phase() is Phase.SUSPENDED
    assert world.jobset is None
    assert world.cluster.list_objects("workloads") == []
    assert [attempt.message for attempt in world.status.attempts] == ["suspended"]
    assert world.condition("QuotaReserved") == (ConditionStatus.UNKNOWN, "NotQueued")
    assert world.controllers.kueue.undone == []
    assert await world.record_writes(rounds=3) == []
    world.edit(suspend=False)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["Requested", None]


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


@pytest.mark.parametrize(
    ("labels", "managed_by", "owned", "is_queued"),
    [
        ({}, None, False, False),
        (QUEUE, None, False, True),
        ({}, "kueue.x-k8s.io/multikueue", False, True),
        ({}, "jobset.sigs.k8s.io/jobset-controller", False, False),
        ({}, None, True, True),
    ],
    ids=["nothing", "its queue", "managedBy of Kueue", "managedBy of JobSet", "a Workload that it owns"],
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
        world.controllers.kueue.quota = True
        await world.run_until_settled(rounds=6)
        assert [pod["status"]["phase"] for pod in world.pods] == ["Running", "Pending"]
        world.controllers.kueue.evict("PodsReadyTimeout", "Exceeded the PodsReady timeout default/lm")
        await world.run_until_settled(rounds=6)
    assert world.phase() is Phase.QUEUED
    assert world.status.attempts == ()
    assert world.status.restarts.total == 0
    assert world.status.operator.starts_without_checkpoint == 0
    assert "PodsReadyTimeout" in world.message("QuotaReserved")
    assert world.events.count("StartWithdrawn") == 4
    world.controllers.gone.clear()
    world.controllers.kueue.quota = True
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes == [None]


async def test_a_queued_job_that_is_over_is_stopped_without_a_word_to_kueue() -> None:
    world = await running(restarts={"maxFailures": 0})
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    assert world.phase() is Phase.FAILED
    assert "apply" not in writes_of_jobsets(world)
    world = await running(spot=True, restarts={"maxDisruptions": 0})
    world.preempt()
    await world.run_until_settled()
    assert world.phase() is Phase.FAILED
    assert world.controllers.kueue.undone == []
    assert world.jobset is None


async def test_a_jobset_without_a_queue_that_is_suspended_as_it_is_made_is_left_to_who_did_it() -> None:
    world = World()

    def suspend(plural: str, body: dict[str, Any]) -> dict[str, Any]:
        return body | {"spec": body["spec"] | {"suspend": True}} if plural == "jobsets" else body

    world.cluster.admission = suspend
    await world.run_until_settled(rounds=20)
    assert writes_of_jobsets(world) == ["create"]
    assert world.phase() is Phase.QUEUED
    assert world.condition("QuotaReserved") == (ConditionStatus.UNKNOWN, "NoWorkload")
    assert world.jobset is not None
    spec = world.jobset["spec"] | {"suspend": False}
    world.cluster.put("jobsets", world.jobset | {"spec": spec})
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING


@pytest.mark.parametrize("default_queue", [None, "default"])
@pytest.mark.parametrize("quota", [True, False])
async def test_an_unreadable_job_that_is_to_be_suspended_leaves_its_queue(
    default_queue: str | None, *, quota: bool
) -> None:
    world = queued(quota=quota, default_queue=default_queue)
    await world.run_until_settled(rounds=6)
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    spec = raw["spec"] | {"placement": "here", "suspend": True}
    world.cluster.put("checkpointedtrainingjobs", raw | {"spec": spec})
    await world.run_until_settled(rounds=20)
    assert world.jobset is None
    assert world.pods == []
    assert writes_of_jobsets(world) == ["create", "delete"]
    assert world.controllers.kueue.undone == []
