"""Jobs on the machines of a QueuedResource: they wait, start, lose them, and resume; also where Kueue starts them."""

from typing import Any

import pytest

from fake_cluster.job_machines import change, machines, running, world_of
from fake_cluster.stories import count_restarts, play
from fake_cluster.world import World

GUARANTEED: dict[str, Any] = {"guaranteed": {}}


@pytest.mark.parametrize(
    ("resource", "reason", "words"),
    [
        (None, "QueuedResourceNotFound", "does not exist in namespace default"),
        (machines(namespace="other"), "QueuedResourceNotFound", "only a QueuedResource of its own namespace"),
        (machines(deleting=True), "QueuedResourceDeleting", "being deleted"),
        (
            machines(active=False, joined=False, state="WaitingForResources", message="in the queue"),
            "WaitingForQueuedResource",
            "is WaitingForResources: in the queue",
        ),
        (machines(joined=False, message="1 of 2 hosts"), "WaitingForNodes", "1 of 2 hosts"),
        (
            machines(joined=False, message="1 of 2 hosts", missing_since=1_800_000_000.0),
            "WaitingForNodes",
            "deadline 2027-01-15T08:15:00Z): 1 of 2 hosts",
        ),
        (
            machines(joined=False, join_timed_out=True, message="look at the script"),
            "NodesJoinTimeout",
            "have not joined the cluster in time: look at the script",
        ),
    ],
)
async def test_a_job_waits_for_its_machines_suspended_and_says_for_what(
    resource: dict[str, Any] | None, reason: str, words: str
) -> None:
    world = await play(
        world_of(resource), f"run, gone, phase Suspended, condition Suspended True/{reason}, rests"
    )
    assert words in world.message("Suspended")
    assert world.events == ["Suspended"]


async def test_a_resource_that_is_made_again_under_its_name_gets_the_pods_and_not_the_old_one() -> None:
    world = await running()
    await change(world, deleting=True)
    await play(world, "pods 0")
    await change(world, uid="uid-b", active=False, joined=False)
    await play(world, "pods 0")
    await change(world, uid="uid-b")
    await play(world, "phase Running, causes Requested -")
    selectors = [pod["spec"]["nodeSelector"] for pod in world.pods]
    assert selectors == [{"stepkeeper.dev/queued-resource-uid": "uid-b"}] * 2
    assert world.status.restarts.total == 1


async def test_slices_of_a_job_stay_on_slices_of_the_machines_where_there_are_several() -> None:
    alone, several = await running(), await running(count=2)
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert alone.jobset is not None
    assert several.jobset is not None
    assert key not in alone.jobset["metadata"]["annotations"]
    assert several.jobset["metadata"]["annotations"][key] == "stepkeeper.dev/slice"


@pytest.mark.parametrize(
    ("tier", "asked", "read_back", "shown", "counted_on_s"),
    [
        (GUARANTEED, None, "", "On", 300),
        (GUARANTEED, None, "On", "On", 300),
        (GUARANTEED, None, "Off", "Off", 30),
        (GUARANTEED, None, "Mixed", "Mixed", 30),
        (GUARANTEED, True, "Off", "Off", 30),
        (GUARANTEED, False, "", "Off", 30),
        (GUARANTEED, False, "On", "On", 300),
        ({"spot": {}}, None, "", "Off", 15),
        ({"spot": {}}, True, "On", "On", 15),
        ({"bestEffort": {}}, None, "", "Off", 30),
        ({"bestEffort": {}}, True, "On", "On", 300),
        ({"bestEffort": {}}, True, "Off", "Off", 30),
    ],
)
async def test_pods_have_five_minutes_where_the_cloud_has_autocheckpoint_on_and_their_job_says_so(
    tier: dict[str, Any], asked: bool | None, read_back: str, shown: str, counted_on_s: int
) -> None:
    world = await running(tier=tier, autocheckpoint=asked, read_back=read_back)
    spec = world.pods[0]["spec"]
    env = {variable["name"]: variable.get("value") for variable in spec["containers"][0]["env"]}
    found = spec["terminationGracePeriodSeconds"], env["STEPKEEPER_GRACE_S"]
    assert found == (300 if shown == "On" else 30, str(counted_on_s))
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.autocheckpoint == shown
    assert world.status.resources is not None
    assert world.status.resources.queued_resource_name == "pod-a"
    await play(world, f"message GraceSufficient autocheckpoint is {shown} on pod-a, rests")
    await change(world, tier=tier, autocheckpoint=asked, read_back="Off" if shown == "On" else "On")
    assert world.status.checkpoint.autocheckpoint not in {shown, None}


@pytest.mark.parametrize(
    ("tier", "cause"),
    [({"spot": {}}, "SpotPreemption"), ({"bestEffort": {}}, "QueuePreemption"), (GUARANTEED, "NodeFailure")],
)
async def test_machines_that_are_taken_away_are_the_cause_and_the_job_comes_back_with_them(
    tier: dict[str, Any], cause: str
) -> None:
    world = await running(tier=tier)
    await change(world, tier=tier, active=False, joined=False, state="Suspended", message="no capacity")
    lost = (
        f"phase Suspended, condition Suspended True/WaitingForQueuedResource, pods 0, causes {cause}, rests"
    )
    await play(world, lost)
    await change(world, tier=tier)
    await play(world, f"phase Running, causes {cause} -")
    assert count_restarts(world).keys() == {cause}


async def test_each_thing_that_a_job_waits_for_is_an_event() -> None:
    world = await play(world_of(None), "run 2")
    await change(world, active=False, joined=False, state="WaitingForResources")
    await change(world, joined=False, message="1 of 2 hosts")
    await change(world, joined=False, message="0 of 2 hosts")
    await change(world, joined=False, join_timed_out=True)
    await change(world)
    waits = ["WaitingForQueuedResource", "WaitingForNodes", "NodesJoinTimeout"]
    assert world.events == ["Suspended", *waits, "Pending", "Running"]


READY = machines()
ABSENT = machines(active=False, joined=False, state="WaitingForResources")


async def see(world: World, resource: dict[str, Any]) -> None:
    world.cluster.put("queuedresources", resource)
    await world.run_until_settled(rounds=15)
    assert world.controllers.kueue.undone == []


async def queued(resource: dict[str, Any], *, quota: bool = True) -> World:
    world = world_of(resource)
    world.controllers.kueue.install(quota=quota, default_queue="tpus")
    await see(world, resource)
    return world


async def test_a_job_joins_the_queue_once_its_machines_are_there_and_kueue_starts_it() -> None:
    # It takes no place in the queue, and no quota, while it couldn't run.
    world = await play(
        await queued(ABSENT, quota=False), "gone, condition Suspended True/WaitingForQueuedResource"
    )
    await see(world, READY)
    await play(world, "suspended, pods 0, quota")  # only Kueue starts it
    await see(world, READY)
    await play(world, "phase Running")
