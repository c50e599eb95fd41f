"""Test that a job is refused whose slices its QueuedResource hasn't, or whose slices other jobs have."""

from typing import Any, Final

import pytest

from fake_cluster.job_machines import TPU, machines, running
from fake_cluster.stories import table
from fake_cluster.world import World, training_job
from stepkeeper_operator.api.v1alpha1.conditions import Phase
from stepkeeper_operator.facts.raw import RawObject, render_time

ONE_HOST: Final = {"accelerator": "v5e", "topology": "2x4"}
MANY_HOSTS: Final = {"accelerator": "v5e", "topology": "4x4"}
OVER: Final = {"conditions": [{"type": "Finished", "status": "True", "lastTransitionTime": render_time(0)}]}
BEGUN: Final = {"attempts": [{"number": 1, "start": render_time(0)}]}


def resource_of(**slices: Any) -> RawObject:
    raw = machines()
    return raw | {"spec": raw["spec"] | {"slices": raw["spec"]["slices"] | slices}}


async def play(resource: RawObject, *others: RawObject, labels: Any = None, **tpu: Any) -> World:
    """Run the world's job with this placement on the resource, beside these other jobs."""
    world = World(placement={"tpu": TPU | tpu})
    raw = world.cluster.objects["checkpointedtrainingjobs", "default", "lm"]
    world.cluster.put(
        "checkpointedtrainingjobs", raw | {"metadata": raw["metadata"] | {"labels": labels or {}}}
    )
    for each in (resource, *others):
        world.cluster.put("queuedresources" if each is resource else "checkpointedtrainingjobs", each)
    await world.run_until_settled(rounds=4)
    return world


def other(
    name: str = "first", *, age_s: float = 60, namespace: str = "default", suspend: bool = False, **more: Any
) -> RawObject:
    """Make another job on the resource that is older than the world's by so many seconds."""
    created_at = World().job.metadata.creation_timestamp
    assert created_at is not None
    status = more.pop("status", {})
    raw = training_job(placement={"tpu": TPU | more}, suspend=suspend)
    raw["spec"]["checkpoint"]["uri"] = f"gs://bucket/runs/{name}"
    meta = {"name": name, "namespace": namespace, "uid": name}
    return raw | {
        "metadata": meta | {"creationTimestamp": render_time(created_at - age_s)},
        "status": status,
    }


FITS: Final[dict[str, tuple[dict[str, Any], dict[str, Any], bool]]] = {
    "the same": (MANY_HOSTS, {"topology": "4x4"}, True),
    "another generation": (MANY_HOSTS, {"accelerator": "v6e", "topology": "4x4"}, False),
    "a part of a slice of several hosts": (MANY_HOSTS, {"topology": "2x4"}, False),
    "more than a slice": (ONE_HOST, {"topology": "4x4"}, False),
    "a part of a slice of one host": (ONE_HOST, {"topology": "2x2"}, True),
    "more slices": (MANY_HOSTS | {"count": 2}, {"topology": "4x4", "slices": 3}, False),
    "some of the slices": (MANY_HOSTS | {"count": 2}, {"topology": "4x4"}, True),
}


@pytest.mark.parametrize(("slices", "tpu", "fits"), FITS.values(), ids=FITS)
async def test_a_job_asks_for(slices: dict[str, Any], tpu: dict[str, Any], *, fits: bool) -> None:
    world = await play(resource_of(**slices), **tpu)
    assert (world.condition("Accepted") == ("False", "QueuedResourceMismatch")) is not fits
    assert (world.phase() is Phase.RUNNING) is fits
    if not fits:
        assert world.jobset is None
        for words in ("v5e", slices["topology"], "spec.placement.tpu", "pod-a"):
            assert words in world.message("Accepted")


async def test_a_resource_that_can_not_be_read_refuses_no_job() -> None:
    raw = machines()
    world = await play(raw | {"spec": {"slices": {"count": 2}}}, other())
    assert world.condition("Accepted") == ("True", "SpecAccepted")


async def test_a_refused_job_starts_once_the_resource_has_other_slices() -> None:
    world = await play(resource_of(**MANY_HOSTS))
    assert world.phase() is not Phase.RUNNING
    world.cluster.put("queuedresources", resource_of(**ONE_HOST))
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING


async def test_pods_that_run_are_left_alone_when_the_resource_no_longer_fits() -> None:
    world = await running()
    uids = [pod["metadata"]["uid"] for pod in world.pods]
    world.cluster.put("queuedresources", resource_of(**MANY_HOSTS))
    await world.run_until_settled(rounds=4)
    assert [pod["metadata"]["uid"] for pod in world.pods] == uids
    assert world.condition("Accepted") == ("False", "QueuedResourceMismatch")


@table(
    "slices, others, tpu, runs",
    {
        "beside none": (ONE_HOST, (), {}, True),
        "beside one that needs all": (ONE_HOST, (other(),), {}, False),
        "beside a younger one": (ONE_HOST, (other(age_s=-60),), {}, True),
        "beside a younger one that has begun": (ONE_HOST, (other(age_s=-60, status=BEGUN),), {}, False),
        "beside one that has ended": (ONE_HOST, (other(status=OVER),), {}, True),
        "beside a suspended one": (
            ONE_HOST,
            (other(suspend=True, status={"phase": "Suspended"}),),
            {},
            True,
        ),
        "beside one of another namespace": (ONE_HOST, (other(namespace="team"),), {}, True),
        "beside one that names another": (ONE_HOST, (other(queuedResourceName="pod-b"),), {}, True),
        "beside one that doesn't fit": (ONE_HOST, (other(accelerator="v6e"),), {}, True),
        "on the other half of a host": (ONE_HOST, (other(topology="2x2"),), {"topology": "2x2"}, True),
        "as the third on a host": (
            ONE_HOST,
            (other(topology="2x2"), other("second", topology="2x2")),
            {"topology": "2x2"},
            False,
        ),
        "on the second slice": (ONE_HOST | {"count": 2}, (other(),), {}, True),
        "on a slice of which another has a part": (
            ONE_HOST | {"count": 2},
            (other(topology="2x2"), other("second", topology="2x2")),
            {"topology": "2x2"},
            False,
        ),
    },
)
async def test_a_job_shares_a_resource(
    slices: dict[str, Any], others: tuple[RawObject, ...], tpu: dict[str, Any], *, runs: bool
) -> None:
    world = await play(resource_of(**slices), *others, **tpu)
    assert (world.phase() is Phase.RUNNING) is runs
    assert (world.condition("Accepted") == ("False", "QueuedResourceInUse")) is not runs
    if not runs:
        assert "first" in world.message("Accepted")
        assert (await world.reconcile() or 99) <= 30, "it looks again by itself"
        for each in others:
            meta = each["metadata"]
            world.cluster.remove("checkpointedtrainingjobs", meta["namespace"], meta["name"])
        await world.run_until_settled(rounds=4)
        assert world.phase() is Phase.RUNNING


async def test_a_queue_of_kueue_decides_itself_who_runs() -> None:
    world = await play(resource_of(**ONE_HOST), other(), labels={"kueue.x-k8s.io/queue-name": "tpus"})
    assert world.condition("Accepted") == ("True", "SpecAccepted")


async def test_a_suspended_job_needs_no_place() -> None:
    world = World(placement={"tpu": TPU}, suspend=True)
    world.cluster.put("queuedresources", resource_of(**ONE_HOST))
    world.cluster.put("checkpointedtrainingjobs", other())
    await world.run_until_settled(rounds=4)
    assert world.condition("Accepted") == ("True", "SpecAccepted")


async def test_a_job_that_has_begun_keeps_its_place_beside_an_older_one() -> None:
    world = await running()
    world.cluster.put("checkpointedtrainingjobs", other())
    await world.run_until_settled(rounds=4)
    assert world.condition("Accepted") == ("True", "SpecAccepted")
