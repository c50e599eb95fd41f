"""Jobs on the machines of a QueuedResource: they wait, start, lose them, and resume."""

from typing import Any

import pytest

from fake_cluster.job_machines import TPU, change, machines, running, world_of
from fake_cluster.kubelets import termination_message
from fake_cluster.world import World, training_job
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.cache.keys import job_key, queued_resource_key

GUARANTEED: dict[str, Any] = {"guaranteed": {}}


def read_graces(world: World) -> tuple[int, int]:
    """Return the grace period of the pods, and the part of it that their trainers are told to count on."""
    spec = world.pods[0]["spec"]
    env = {variable["name"]: variable.get("value") for variable in spec["containers"][0]["env"]}
    return spec["terminationGracePeriodSeconds"], int(env["STEPKEEPER_GRACE_S"])


@pytest.mark.parametrize(
    ("resource", "reason", "words"),
    [
        (None, "QueuedResourceNotFound", "doesn't exist in namespace default"),
        (machines(namespace="other"), "QueuedResourceNotFound", "only one of its own namespace"),
        (machines(deleting=True), "QueuedResourceDeleting", "being deleted"),
        (
            machines(active=False, joined=False, state="WaitingForResources", message="in the queue"),
            "WaitingForQueuedResource",
            "is WaitingForResources now: in the queue",
        ),
        (machines(joined=False, message="1 of 2 hosts"), "WaitingForNodes", "1 of 2 hosts"),
        (
            machines(joined=False, message="1 of 2 hosts", missing_since=1_800_000_000.0),
            "WaitingForNodes",
            "have until 2027-01-15T08:15:00Z: 1 of 2 hosts",
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
    world = world_of(resource)
    await world.run_until_settled()
    assert world.jobset is None
    assert world.phase() is Phase.SUSPENDED
    assert world.condition("Suspended") == (ConditionStatus.TRUE, reason)
    message = next(c.message for c in world.status.conditions if c.type == "Suspended")
    assert words in message
    assert world.events == ["Suspended"]
    assert await world.record_writes(rounds=3) == []


async def test_a_resource_that_is_made_again_under_its_name_gets_the_pods_and_not_the_old_one() -> None:
    world = await running()
    await change(world, deleting=True)
    assert world.pods == []
    await change(world, uid="uid-b", active=False, joined=False)
    assert world.pods == []
    await change(world, uid="uid-b")
    assert world.phase() is Phase.RUNNING
    selectors = [pod["spec"]["nodeSelector"] for pod in world.pods]
    assert selectors == [{"stepkeeper.dev/queued-resource-uid": "uid-b"}] * 2
    assert world.causes == ["Requested", None]
    assert world.status.restarts.total == 1


async def test_slices_of_a_job_stay_on_slices_of_the_machines_where_there_are_several() -> None:
    alone, several = await running(), await running(count=2)
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert alone.jobset is not None
    assert several.jobset is not None
    assert key not in alone.jobset["metadata"]["annotations"]
    assert several.jobset["metadata"]["annotations"][key] == "stepkeeper.dev/slice"


@pytest.mark.parametrize(
    ("tier", "autocheckpoint", "read_back", "grace_s", "counted_on_s"),
    [
        ({"guaranteed": {}}, None, "", 300, 300),
        ({"guaranteed": {}}, None, "On", 300, 300),
        ({"guaranteed": {}}, None, "Off", 30, 30),
        ({"guaranteed": {}}, None, "Mixed", 30, 30),
        ({"guaranteed": {}}, False, "", 30, 30),
        ({"guaranteed": {}}, False, "On", 300, 300),
        ({"spot": {}}, None, "", 30, 15),
        ({"spot": {}}, True, "On", 300, 15),
        ({"bestEffort": {}}, None, "", 30, 30),
        ({"bestEffort": {}}, True, "On", 300, 300),
        ({"bestEffort": {}}, True, "Off", 30, 30),
    ],
)
async def test_pods_have_five_minutes_where_the_cloud_has_autocheckpoint_on(
    tier: dict[str, Any], autocheckpoint: bool | None, read_back: str, grace_s: int, counted_on_s: int
) -> None:
    world = await running(tier=tier, autocheckpoint=autocheckpoint, read_back=read_back)
    assert read_graces(world) == (grace_s, counted_on_s)


@pytest.mark.parametrize(
    ("asked", "read_back", "shown"),
    [
        (None, "", "On"),
        (True, "Off", "Off"),
        (False, "On", "On"),
        (None, "Mixed", "Mixed"),
    ],
)
async def test_a_job_says_what_autocheckpoint_its_machines_have(
    asked: bool | None, read_back: str, shown: str
) -> None:
    world = await running(autocheckpoint=asked, read_back=read_back)
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.autocheckpoint == shown
    assert world.status.resources is not None
    assert world.status.resources.queued_resource_name == "pod-a"
    grace = next(c for c in world.status.conditions if c.type == "GraceSufficient")
    assert f"autocheckpoint is {shown} on pod-a" in grace.message
    assert await world.record_writes() == []
    await change(world, autocheckpoint=asked, read_back="Off" if shown == "On" else "On")
    assert world.status.checkpoint is not None
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
    assert world.phase() is Phase.SUSPENDED
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "WaitingForQueuedResource")
    assert world.pods == []
    assert world.causes == [cause]
    assert await world.record_writes(rounds=3) == []
    await change(world, tier=tier)
    assert world.phase() is Phase.RUNNING
    assert world.causes == [cause, None]
    counts = {count.cause: count.count for count in world.status.restarts.by_cause}
    assert counts == {cause: 1}


async def test_a_lost_node_of_preempted_machines_is_a_preemption_also_once_they_are_back() -> None:
    world = await running(tier={"spot": {}})
    node = world.pods[0]["spec"]["nodeName"]
    world.lose_node(node)
    world.cluster.put(
        "queuedresources", machines(tier={"spot": {}}, active=False, joined=False, state="Suspended")
    )
    await world.run_until_settled(rounds=40)
    assert set(world.causes) == {"SpotPreemption"}
    await change(world, tier={"spot": {}})
    assert {cause for cause in world.causes if cause is not None} == {"SpotPreemption"}


@pytest.mark.parametrize(
    ("begins_in_s", "notice", "cause"),
    [
        (-10, "sigterm", "Maintenance"),
        (30, "sigterm", "Maintenance"),  # the cloud's clock isn't ours
        (-3700, "sigterm", "Maintenance"),
        (86_400, "sigterm", "Requested"),
        (-86_400, "sigterm", "Requested"),
        (-10, "file", "Requested"),
    ],
)
async def test_a_training_that_ends_by_itself_when_its_maintenance_begins_has_ended_for_it(
    begins_in_s: int, notice: str, cause: str
) -> None:
    """Autocheckpoint tells the processes, no pod is deleted, and the resource stays active: the machines come back."""
    world = await running()
    await change(world, maintenance_at=(world.now + begins_in_s,))
    for pod in world.pods:
        world.controllers.end_pod(pod, 75, message=termination_message(75, notice=notice, step=10))
    await world.run_until_settled()
    assert world.causes == [cause, None]
    (count,) = world.status.restarts.by_cause
    assert (count.cause, count.count, count.counted_towards_limit) == (cause, 1, 0)


async def test_a_pod_that_is_deleted_in_the_midst_of_maintenance_has_not_ended_for_it() -> None:
    world = await running()
    await change(world, maintenance_at=(world.now,))
    kubelets = world.controllers.kubelets
    kubelets.stop_code, kubelets.stop_message = 75, termination_message(75, notice="sigterm")
    for pod in world.pods:
        world.cluster.mark_deleted("pods", pod["metadata"]["namespace"], pod["metadata"]["name"], grace_s=30)
    await world.run_until_settled()
    assert world.causes[0] == "Requested"


async def test_a_change_or_deletion_that_somebody_asked_for_is_requested() -> None:
    world = await running()
    await change(world, active=False, joined=False, state="Deleting", removing="SpecChanged")
    assert world.causes == ["Requested"]
    await change(world)
    await change(world, deleting=True)
    assert world.causes == ["Requested", "Requested"]
    assert world.status.restarts.total == 1


async def test_each_thing_that_a_job_waits_for_is_an_event() -> None:
    world = world_of(None)
    await world.run_until_settled(rounds=2)
    await change(world, active=False, joined=False, state="WaitingForResources")
    await change(world, joined=False, message="1 of 2 hosts")
    await change(world, joined=False, message="0 of 2 hosts")
    await change(world, joined=False, join_timed_out=True)
    await change(world)
    waits = ["WaitingForQueuedResource", "WaitingForNodes", "NodesJoinTimeout"]
    assert world.events == ["Suspended", *waits, "Pending", "Running"]


async def test_an_operator_that_cannot_see_the_machines_blames_them_for_nothing() -> None:
    world = await running()
    world.restart_operator(queued_resources=False)
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]


async def test_all_jobs_that_name_a_resource_are_looked_at_when_it_changes() -> None:
    world = await running()
    other = training_job(
        placement={"tpu": TPU}, checkpoint={"uri": "gs://b/o", "interval": {"every": {"steps": 1}}}
    )
    other["metadata"]["name"] = "other"
    world.cluster.put("checkpointedtrainingjobs", other)
    raw = world.cache.get_object(queued_resource_key("default", "pod-a"))
    assert raw is not None
    keys = (job_key("default", "lm"), job_key("default", "other"))
    assert world.cache.record_queued_resource(raw)[1:] == keys
    world.cluster.remove("checkpointedtrainingjobs", "default", "other")
    assert world.cache.record_queued_resource(raw)[1:] == keys[:1]
