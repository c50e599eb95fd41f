"""Test that of two jobs whose checkpoints are in one root, the younger is refused and told of the older."""

from typing import Any

import pytest

from fake_cluster.world import World, training_job
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.facts import read_job_root
from stepkeeper_operator.facts.raw import render_time

URI = "gs://bucket/runs/lm"  # that of the world's job


def other_job(
    world: World, *, age_s: float = 60, uri: str = URI, namespace: str = "team", **status: Any
) -> None:
    """Make another job that is older than the world's by so many seconds."""
    raw = training_job(checkpoint={"uri": uri, "interval": {"steps": 100}})
    created_at = world.job.metadata.creation_timestamp
    assert created_at is not None
    at = render_time(created_at - age_s)
    meta = {"name": "first", "namespace": namespace, "uid": "first", "creationTimestamp": at}
    world.cluster.put("checkpointedtrainingjobs", raw | {"metadata": meta, "status": status})


def said(world: World) -> str:
    return next(c.message for c in world.status.conditions if c.type == "Accepted")


@pytest.mark.parametrize("uri", [URI, "gs://bucket/runs", "gs://bucket", f"{URI}/child"])
async def test_the_younger_of_two_jobs_in_one_root_is_refused_with_the_name_of_the_older(uri: str) -> None:
    world = World()
    other_job(world, uri=uri)
    await world.run_until_settled(rounds=4)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "RootInUse")
    assert "job team/first keeps its checkpoints in " + uri in said(world)
    assert world.events.count("RootInUse") == 1
    assert world.jobset is None
    assert world.status.attempts == ()
    assert await world.record_writes(rounds=3) == []
    world.cluster.remove("checkpointedtrainingjobs", "team", "first")
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING


async def test_a_refused_job_looks_again_by_itself() -> None:
    world = World()
    other_job(world)
    await world.reconcile()
    world.now += 2
    again_s = await world.reconcile()
    assert again_s is not None
    assert again_s <= 30


DONE = {"conditions": [{"type": "Complete", "status": "True", "lastTransitionTime": "2027-01-01T00:00:00Z"}]}
OTHERS: dict[str, dict[str, Any]] = {
    "is younger": {"age_s": -60},
    "has another bucket": {"uri": "gs://other/runs/lm"},
    "has a sibling folder": {"uri": "gs://bucket/runs/lm2"},
    "is over": DONE,
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
async def test_a_job_is_not_refused_for_one_that(other: dict[str, Any]) -> None:
    world = World()
    other_job(world, **other)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING


async def test_a_job_is_refused_for_a_younger_one_that_has_begun() -> None:
    world = World()
    attempt = {"number": 1, "start": "2027-01-01T00:00:00Z"}
    other_job(world, age_s=-60, attempts=[attempt])
    await world.run_until_settled(rounds=4)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "RootInUse")


async def test_a_job_that_has_begun_goes_on_beside_an_older_one_in_its_root() -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    other_job(world)
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    assert world.condition("Accepted") == (ConditionStatus.TRUE, "SpecAccepted")
    assert world.causes == ["ApplicationError", None]


async def test_a_suspended_job_leaves_its_root_to_one_that_takes_it_over_once_its_pods_have_ended() -> None:
    world = World()
    other_job(world, phase="Suspending")
    raw = world.cluster.objects["checkpointedtrainingjobs", "team", "first"]
    world.cluster.put("checkpointedtrainingjobs", raw | {"spec": raw["spec"] | {"suspend": True}})
    await world.run_until_settled(rounds=2)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "RootInUse")
    raw = world.cluster.objects["checkpointedtrainingjobs", "team", "first"]
    world.cluster.put("checkpointedtrainingjobs", raw | {"status": {"phase": "Suspended"}})
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING


CLAIM = {"persistentVolumeClaim": {"claimName": "runs"}}
HOST = {"hostPath": {"path": "/mnt/disk/"}}
NFS = {"nfs": {"server": "10.0.0.2", "path": "/export"}}


def root_on(source: dict[str, Any], *, uri: str = "file:///data/lm", **mount: Any) -> tuple[str, ...] | None:
    """Read the root of a job on a volume that is mounted at /data."""
    mounts = [{"name": "v", "mountPath": "/data", **mount}]
    container = {"name": "trainer", "image": "i", "volumeMounts": mounts}
    template = {"spec": {"containers": [container], "volumes": [{"name": "v", **source}]}}
    raw = training_job(template=template, checkpoint={"uri": uri, "interval": {"steps": 1}})
    found = read_job_root(raw | {"metadata": raw["metadata"] | {"uid": "u"}})
    return None if found is None else found.place


@pytest.mark.parametrize(
    ("found", "place"),
    [
        (root_on(CLAIM), ("claim", "default", "runs", "lm")),
        (root_on(CLAIM, subPath="a/b"), ("claim", "default", "runs", "a", "b", "lm")),
        (root_on(HOST), ("host", "mnt", "disk", "lm")),
        (root_on(NFS), ("nfs", "10.0.0.2", "export", "lm")),
        (root_on({"emptyDir": {}}), None),
        (root_on(CLAIM, subPathExpr="$(POD)"), None),
        (root_on(CLAIM, uri="file:///elsewhere/lm"), None),
        (root_on(CLAIM, uri="file:///data/../data/lm"), ("claim", "default", "runs", "lm")),
        (root_on(CLAIM, uri="s3://b/lm"), None),
        (root_on(CLAIM, uri="gs://[b"), None),
    ],
    ids=[
        "claim",
        "subPath",
        "host",
        "nfs",
        "a pod's own",
        "subPathExpr",
        "no volume",
        "a path in curves",
        "no uri of ours",
        "no uri at all",
    ],
)
def test_a_file_root_is_told_by_its_volume_and_folder(
    found: tuple[str, ...] | None, place: tuple[str, ...] | None
) -> None:
    assert found == place


@pytest.mark.parametrize(
    "spec", [None, "x", {}, {"checkpoint": 3}, {"checkpoint": {"uri": "file:///a"}, "template": []}]
)
def test_a_spec_that_can_not_be_read_has_no_root(spec: object) -> None:
    assert read_job_root({"metadata": {"namespace": "a", "name": "b", "uid": "c"}, "spec": spec}) is None
