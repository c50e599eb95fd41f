"""Test the cache: what it keeps, whom a change concerns, and objects that are gone unnoticed."""

from typing import Any

import pytest

from fake_cluster.stories import play, run_job
from fake_cluster.world import World, training_job
from stepkeeper_operator.cache.cache import Cache
from stepkeeper_operator.cache.keys import job_key, queued_resource_key
from stepkeeper_operator.cluster.resources import QUEUED_RESOURCES
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.labels import (
    JOB_UID_LABEL,
    JOBSET_NUMBER_LABEL,
    QUEUED_RESOURCE_UID_LABEL,
    RESTART_ATTEMPT_LABEL,
)

QR = queued_resource_key("default", "slice")
JOB = job_key("default", "lm")


def queued_resource(version: int = 1, **meta: str) -> dict[str, Any]:
    changed = {"name": "slice", "namespace": "default", "uid": "qr-1", "resourceVersion": str(version)} | meta
    return {"metadata": changed | {"managedFields": [{}]}, "spec": {}}


def job_on(
    queued_resource: str | None, *, uid: str = "job-1", version: int = 1, hosts: int = 0, **meta: str
) -> dict[str, Any]:
    tpu = {"accelerator": "v5p", "topology": "2x2x1", "slices": 1}
    tpu |= {} if queued_resource is None else {"queuedResourceName": queued_resource}
    raw = training_job(placement={"hosts": {"count": hosts}} if hosts else {"tpu": tpu})
    return raw | {"metadata": raw["metadata"] | {"uid": uid, "resourceVersion": str(version)} | meta}


def node(
    *, uid: str = "node-1", label: str | None = "qr-1", ready: str = "True", **spec: Any
) -> dict[str, Any]:
    labels = {} if label is None else {QUEUED_RESOURCE_UID_LABEL: label}
    condition = {"type": "Ready", "status": ready, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {
        "metadata": {"name": "n", "uid": uid, "labels": labels},
        "spec": spec,
        "status": {"conditions": [condition]},
    }


def known(*raws: dict[str, Any]) -> Cache:
    """Return a cache with both QueuedResources, `slice` (qr-1) and `other` (qr-2), and these jobs."""
    cache = Cache(lambda: 0.0)
    cache.record_queued_resource(queued_resource())
    cache.record_queued_resource(queued_resource(name="other", uid="qr-2"))
    for raw in raws:
        cache.record_training_job(raw)
    return cache


def test_a_change_of_a_queued_resource_concerns_the_jobs_that_name_it() -> None:
    cache = known(job_on("slice", name="b", uid="b"), job_on("slice", name="a", uid="a"))
    jobs = (job_key("default", "a"), job_key("default", "b"))
    assert cache.record_queued_resource(queued_resource(2)) == (QR, *jobs)
    assert cache.record_queued_resource(queued_resource(2, name="other", uid="qr-2"))[1:] == ()
    assert cache.record_queued_resource(queued_resource(3), deleted=True) == (QR, *jobs)
    assert cache.get_object(QR) is None


def test_a_queued_resource_that_is_gone_unnoticed_concerns_its_jobs() -> None:
    cache = known(job_on("slice"))
    assert set(cache.forget_objects(frozenset({"qr-1"}))) == {QR, JOB}
    assert cache.get_object(QR) is None
    assert cache.list_uids(QUEUED_RESOURCES) == {"qr-2"}


@pytest.mark.parametrize(
    ("before", "after", "concerned"),
    [
        pytest.param(None, node(), {"slice"}, id="joined"),
        pytest.param(node(), node(), set(), id="only lives on"),
        pytest.param(node(ready="False"), node(), {"slice"}, id="became ready"),
        pytest.param(node(), node(ready="Unknown"), {"slice"}, id="fell silent"),
        pytest.param(node(), node(unschedulable=True), {"slice"}, id="was cordoned"),
        pytest.param(node(), node(uid="node-2"), {"slice"}, id="was made again"),
        pytest.param(node(label=None), node(), {"slice"}, id="got the label"),
        pytest.param(node(), node(label=None), {"slice"}, id="lost the label"),
        pytest.param(node(), node(label="qr-2"), {"slice", "other"}, id="changed hands"),
        pytest.param(None, node(label="unknown"), set(), id="names none that is known"),
        pytest.param(None, node(label=None), set(), id="has no label"),
    ],
)
def test_a_node_concerns_the_queued_resource_that_its_label_names(
    before: dict[str, Any] | None, after: dict[str, Any], concerned: set[str]
) -> None:
    cache = known()
    if before is not None:
        cache.record_node(before)
    assert set(cache.record_node(after)) == {queued_resource_key("default", name) for name in concerned}


@pytest.mark.parametrize(
    ("then", "deleted"),
    [
        pytest.param(job_on("other", version=2), False, id="names another"),
        pytest.param(job_on(None, version=2), False, id="names none"),
        pytest.param(job_on(None, version=2, hosts=1), False, id="runs on hosts"),
        pytest.param(job_on("slice"), True, id="is gone"),
    ],
)
def test_a_job_is_not_concerned_that_now(then: dict[str, Any], *, deleted: bool) -> None:
    cache = known(job_on("slice"), job_on("slice", uid="job-2", namespace="elsewhere"))
    assert cache.record_training_job(then, deleted=deleted) == (JOB,)
    assert cache.record_queued_resource(queued_resource(2)) == (QR,)


def silently(world: World, plural: str, namespace: str | None, name: str) -> RawObject:
    """Delete the object while the watch is broken."""
    return world.cluster.objects.pop((plural, namespace, name))


async def test_a_node_that_is_gone_unnoticed_is_remembered_as_lost() -> None:
    world = await run_job()
    name = world.pods[0]["spec"]["nodeName"]
    silently(world, "nodes", None, name)
    assert await world.sweep() == {JOB}
    node = world.cache.get_node(name)
    assert node is not None
    assert node.lost
    assert await world.sweep() == frozenset()


async def test_what_a_watch_brings_late_does_not_undo_what_a_write_was_answered_with() -> None:
    world = await run_job()
    old = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.edit(totalSteps=5)
    assert world.cache.record_training_job(old) == ()
    raw = world.cache.get_object(JOB)
    assert raw is not None
    assert raw["spec"]["totalSteps"] == 5


async def test_a_lost_node_concerns_the_jobs_that_have_pods_on_it() -> None:
    world = await run_job()
    on, off = world.pods[0]["spec"]["nodeName"], "n4"
    for name, concerned in ((on, (JOB,)), (off, ())):
        node = world.cluster.objects["nodes", None, name]
        assert world.cache.record_node(node) == (), "a heartbeat"
        not_ready = node["status"]["conditions"][0] | {"status": "False"}
        assert world.cache.record_node(node | {"status": {"conditions": [not_ready]}}) == ()
        assert world.cache.record_node(node, deleted=True) == concerned


async def test_a_jobset_that_is_gone_unnoticed_holds_a_job_up_for_seconds_only() -> None:
    world = await play(await run_job(), "fail, look")
    pods = [("pods", pod["metadata"]["name"]) for pod in world.pods]
    for plural, name in [("jobsets", "lm"), ("jobs", "lm-w-0"), *pods]:
        silently(world, plural, "default", name)
    world.now += 5
    again_s = await world.reconcile()
    assert again_s is not None
    assert again_s <= 5
    await world.sweep()
    await play(world, "run, phase Running, pods 2")


async def test_a_jobset_and_a_job_that_are_gone_unnoticed_are_found_by_a_sweep() -> None:
    world = await run_job()
    for plural in ("jobsets", "checkpointedtrainingjobs"):
        silently(world, plural, "default", "lm")
        assert await world.sweep() == {JOB}
    assert world.cache.get_jobset(JOB) is None
    assert world.cache.get_object(JOB) is None


async def test_a_pod_of_a_lost_node_that_is_gone_unnoticed_is_given_up_once() -> None:
    world = await play(await run_job(), "lose n1")
    name = world.pods[0]["metadata"]["name"]
    world.cluster.mark_deleted("pods", "default", name, grace_s=30)
    silently(world, "pods", "default", name)
    await play(world, "wait 120, look, rests")
    assert world.cache.get_pod("default", name) is None


def pod_of(owner: str = "lm-w-0", *, number: int = 0, **meta: str) -> dict[str, Any]:
    """Build a pod with the label of job-1, whose own it is if its owner has a name of that job's."""
    labels = {JOB_UID_LABEL: "job-1", JOBSET_NUMBER_LABEL: str(number), RESTART_ATTEMPT_LABEL: "0"}
    ref = {"controller": True, "kind": "Job", "name": owner, "uid": "w"}
    own = {"name": "p", "uid": "p", "namespace": "default", "labels": labels, "ownerReferences": [ref]}
    return {"metadata": own | meta, "spec": {}, "status": {"phase": "Running"}}


@pytest.mark.parametrize("known_first", [True, False])
def test_pods_with_a_copied_label_push_no_evidence_out(*, known_first: bool) -> None:
    cache = known(*[job_on(None)] * known_first)
    cache.record_pod(pod_of())
    for n in range(4):
        cache.record_pod(pod_of(number=900 + n, uid=f"s{n}", name=f"s{n}", namespace="stranger"))
    cache.record_training_job(job_on(None))
    assert [own.uid for entry in cache.list_evidence("job-1") for own in entry.pods] == ["p"]


def test_a_pod_that_goes_before_its_job_is_known_takes_no_evidence_of_others_along() -> None:
    cache = known()
    for pod in (pod_of(), pod_of(uid="q", name="q"), pod_of(uid="s", namespace="stranger")):
        cache.record_pod(pod)
    cache.record_pod(pod_of(uid="s", namespace="stranger"), deleted=True)
    cache.record_pod(pod_of(uid="q", name="q"), deleted=True)
    cache.record_training_job(job_on(None))
    assert [own.uid for entry in cache.list_evidence("job-1") for own in entry.pods] == ["p"]


def test_a_late_answer_to_a_write_of_a_deleted_job_does_not_displace_the_job_made_anew() -> None:
    cache = known(job_on(None, version=10))
    cache.record_training_job(job_on(None, version=12), deleted=True)
    cache.record_training_job(job_on(None, uid="job-2", version=13))
    assert cache.record_training_job(job_on(None, version=11)) == ()
    job = cache.get_object(JOB)
    assert job is not None
    assert job["metadata"]["uid"] == "job-2"


def test_a_pod_that_its_batch_job_gives_up_is_no_longer_the_jobs() -> None:
    """`kubectl delete job --cascade=orphan`, or a change of the pod's labels, removes its owner."""
    cache, owner = (
        known(job_on(None)),
        {"controller": True, "kind": "Job", "uid": "batch-1", "name": "lm-w-0"},
    )
    meta = {"name": "lm-w-0-0", "namespace": "default", "uid": "pod-1", "labels": {JOB_UID_LABEL: "job-1"}}
    for owners, names in ([owner], ["lm-w-0-0"]), ([], []):
        cache.record_pod(
            {"metadata": meta | {"ownerReferences": owners}, "spec": {}, "status": {"phase": "Running"}}
        )
        assert [pod.name for pod in cache.list_pods("job-1")] == names
        assert [item.name for item in cache.list_leftovers(JOB)] == names
    assert not cache._items_of
