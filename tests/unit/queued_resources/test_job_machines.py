"""Jobs on the machines of a QueuedResource: they wait, start, lose them, resume, and save before maintenance."""

from typing import Any

import pytest

from stepkeeper.contract import Head, Report, ReportedCommit, ReportPhase
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.facts.raw import render_time
from stepkeeper_operator.testing import World

TPU = {"accelerator": "v5e", "topology": "2x4", "chipsPerHost": 4, "queuedResourceName": "pod-a"}
GUARANTEED: dict[str, Any] = {"guaranteed": {}}


def machines(
    *,
    tier: dict[str, Any] = GUARANTEED,
    active: bool = True,
    joined: bool = True,
    state: str = "Active",
    message: str = "",
    count: int = 1,
    autocheckpoint: bool | None = None,
    namespace: str = "default",
    deleting: bool = False,
    maintenance_at: float | None = None,
    removing: str = "",
) -> dict[str, Any]:
    """Make a QueuedResource as the API server has it."""
    node: dict[str, Any] = {"acceleratorType": "v5litepod-8", "runtimeVersion": "r", "count": count}
    if autocheckpoint is not None:
        node["autocheckpointEnabled"] = autocheckpoint
    conditions = [
        {"type": "Active", "status": str(active), "message": message},
        {"type": "NodesJoined", "status": str(joined), "message": message},
    ]
    status: dict[str, Any] = {"state": state, "conditions": conditions, "bookkeeping": {"removing": removing}}
    if maintenance_at is not None:
        status["nextMaintenanceTime"] = render_time(maintenance_at)
        conditions.append({"type": "MaintenanceScheduled", "status": "True", "message": "from 10:00"})
    meta: dict[str, Any] = {"name": "pod-a", "namespace": namespace}
    if deleting:
        meta["deletionTimestamp"] = render_time(1_800_000_000.0)
    spec = {"project": "lab-tpus", "zone": "us-central2-b", "node": node, "tier": tier}
    return {"metadata": meta, "spec": spec, "status": status}


def world_of(resource: dict[str, Any] | None, **spec: Any) -> World:
    world = World(placement={"tpu": TPU}, **spec)
    if resource is not None:
        world.cluster.put("queuedresources", resource)
    return world


async def running(**resource: Any) -> World:
    world = world_of(machines(**resource))
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
    return world


async def change(world: World, **resource: Any) -> None:
    world.cluster.put("queuedresources", machines(**resource))
    await world.run_until_settled()


@pytest.mark.parametrize(
    ("resource", "reason", "words"),
    [
        (None, "QueuedResourceNotFound", "doesn't exist in namespace default"),
        (machines(namespace="other"), "QueuedResourceNotFound", "only one of its own namespace"),
        (machines(deleting=True), "QueuedResourceDeleting", "being deleted"),
        (
            machines(active=False, joined=False, state="WaitingForResources", message="in the queue"),
            "WaitingForQueuedResource",
            "(WaitingForResources): in the queue",
        ),
        (machines(joined=False, message="1 of 2 hosts"), "WaitingForNodes", "1 of 2 hosts"),
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


async def test_a_job_starts_once_all_hosts_have_joined() -> None:
    world = world_of(machines(active=False, joined=False))
    await world.run_until_settled()
    await change(world, joined=False)
    assert world.jobset is None
    await change(world)
    assert world.phase() is Phase.RUNNING
    assert world.condition("Suspended") == (ConditionStatus.FALSE, "NotSuspended")


async def test_its_pods_go_to_the_nodes_of_the_resource_and_ask_for_no_gke_labels() -> None:
    world = await running()
    selectors = [pod["spec"]["nodeSelector"] for pod in world.pods]
    assert (
        selectors
        == [
            {"stepkeeper.dev/queued-resource": "pod-a", "stepkeeper.dev/queued-resource-namespace": "default"}
        ]
        * 2
    )


async def test_slices_of_a_job_stay_on_slices_of_the_machines_where_there_are_several() -> None:
    alone, several = await running(), await running(count=2)
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert alone.jobset is not None
    assert several.jobset is not None
    assert key not in alone.jobset["metadata"]["annotations"]
    assert several.jobset["metadata"]["annotations"][key] == "stepkeeper.dev/cloud-node"


@pytest.mark.parametrize(
    ("tier", "autocheckpoint", "grace_s", "counted_on_s"),
    [
        ({"guaranteed": {}}, None, 300, 300),
        ({"guaranteed": {}}, False, 30, 30),
        ({"spot": {}}, None, 30, 15),
        ({"bestEffort": {}}, None, 30, 30),
        ({"bestEffort": {}}, True, 300, 300),
    ],
)
async def test_pods_on_autocheckpoint_nodes_have_five_minutes(
    tier: dict[str, Any], autocheckpoint: bool | None, grace_s: int, counted_on_s: int
) -> None:
    world = await running(tier=tier, autocheckpoint=autocheckpoint)
    spec = world.pods[0]["spec"]
    env = {variable["name"]: variable.get("value") for variable in spec["containers"][0]["env"]}
    assert (spec["terminationGracePeriodSeconds"], env["STEPKEEPER_GRACE_S"]) == (grace_s, str(counted_on_s))


async def test_the_grace_period_of_a_template_is_respected() -> None:
    template = {
        "spec": {"terminationGracePeriodSeconds": 60, "containers": [{"name": "trainer", "image": "t"}]}
    }
    world = world_of(machines(), template=template)
    await world.run_until_settled()
    assert world.pods[0]["spec"]["terminationGracePeriodSeconds"] == 60


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
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "QueuedResourceLost")
    assert world.pods == []
    assert world.causes == [cause]
    assert await world.record_writes(rounds=3) == []
    await change(world, tier=tier)
    assert world.phase() is Phase.RUNNING
    assert world.causes == [cause, None]
    counts = {count.cause: count.count for count in world.status.restarts.by_cause}
    assert counts == {cause: 1}


async def test_pods_that_end_before_the_resource_is_seen_to_be_gone_get_its_cause_as_well() -> None:
    world = await running(tier={"spot": {}})
    world.preempt()
    await world.run_until_settled(rounds=2)
    await change(world, tier={"spot": {}}, active=False, joined=False, state="Suspending")
    assert set(world.causes) == {"SpotPreemption"}
    assert world.phase() is Phase.SUSPENDED


@pytest.mark.parametrize("seen_first", ["the pods' ends", "the loss"])
async def test_one_loss_of_machines_is_one_restart(seen_first: str) -> None:
    """JobSet restarts the pods in place as well, before it is suspended: that attempt never runs."""
    world = await running(tier={"spot": {}})
    lost = machines(tier={"spot": {}}, active=False, joined=False, state="Suspending")
    world.controllers.no_room = True
    world.preempt()
    if seen_first == "the loss":
        world.cluster.put("queuedresources", lost)
    await world.run_until_settled(rounds=2)
    world.cluster.put("queuedresources", lost)
    await world.run_until_settled()
    assert world.phase() is Phase.SUSPENDED
    world.controllers.no_room = False
    await change(world, tier={"spot": {}})
    assert world.causes[-1] is None
    assert world.status.restarts.total == 1
    assert {count.cause: count.count for count in world.status.restarts.by_cause} == {"SpotPreemption": 1}
    assert set(world.causes[:-1]) == {"SpotPreemption"}


async def test_machines_lost_after_they_came_back_are_another_restart() -> None:
    world = await running(tier={"spot": {}})
    for _ in range(2):
        await change(world, tier={"spot": {}}, active=False, joined=False, state="Suspended")
        await change(world, tier={"spot": {}})
    assert world.status.restarts.total == 2
    assert world.causes == ["SpotPreemption", "SpotPreemption", None]


async def test_a_restart_that_loses_its_machines_before_all_its_pods_run_keeps_its_own_cause() -> None:
    world = await running(tier={"spot": {}})
    world.controllers.no_room = True
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled(rounds=2)
    await change(world, tier={"spot": {}}, active=False, joined=False, state="Suspended")
    world.controllers.no_room = False
    await change(world, tier={"spot": {}})
    counts = {count.cause: count.count for count in world.status.restarts.by_cause}
    assert counts == {"ApplicationError": 1}


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


async def test_maintenance_of_guaranteed_machines_is_maintenance() -> None:
    world = await running()
    await change(world, active=False, joined=False, state="Suspending", maintenance_at=world.now)
    assert world.causes == ["Maintenance"]


async def test_a_change_or_deletion_that_somebody_asked_for_is_requested() -> None:
    world = await running()
    await change(world, active=False, joined=False, state="Deleting", removing="SpecChanged")
    assert world.causes == ["Requested"]
    await change(world)
    await change(world, deleting=True)
    assert world.causes == ["Requested", "Requested"]
    assert world.status.restarts.total == 1


async def test_hosts_that_leave_for_a_moment_stop_nothing_that_runs() -> None:
    world = await running()
    await change(world, joined=False, message="1 of 2 hosts")
    assert world.phase() is Phase.RUNNING
    assert world.causes == [None]


async def test_a_job_that_names_no_resource_waits_for_none() -> None:
    world = World()
    world.cluster.put("queuedresources", machines(active=False, joined=False))
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING


def report_of(sequence: int, step: int, *, now: float) -> Report:
    uri = f"gs://bucket/runs/lm/{step}"
    commit = ReportedCommit(
        sequence=sequence, step=step, uri=uri, size_bytes=1, duration_millis=100_000, time_unix_s=int(now)
    )
    head = Head(sequence=sequence, step=step, uri=uri, size_bytes=1)
    return Report(
        phase=ReportPhase.TRAINING, root="r", claim=1, tail=sequence, head=head, step=step, commits=(commit,)
    )


async def test_a_training_is_asked_once_to_save_before_maintenance_with_the_time_that_saves_take() -> None:
    world = await running()
    world.receive_report(report_of(5, 100, now=world.now))
    await change(world, maintenance_at=world.now + 1000)
    uid = world.job.metadata.uid
    assert world.directives.get_directive(uid).checkpoint_now is None
    look_s = await world.reconcile()
    assert look_s is not None
    world.now += 700  # a save takes 100 s: three times that is left
    world.receive_report(report_of(5, 100, now=world.now))
    await world.reconcile()
    request = world.directives.get_directive(uid).checkpoint_now
    assert request is not None
    assert world.events.count("SaveRequested") == 1
    await world.reconcile()
    assert world.directives.get_directive(uid).checkpoint_now == request
    world.restart_operator()
    await world.reconcile()
    assert world.directives.get_directive(uid).checkpoint_now == request
    world.receive_report(report_of(6, 180, now=world.now))
    world.now += 2
    await world.reconcile()
    assert world.directives.get_directive(uid).checkpoint_now is None
    checkpoint = world.status.checkpoint
    assert checkpoint is not None
    assert checkpoint.last_request is not None
    assert (checkpoint.last_request.sequence, checkpoint.last_request.step) == (6, 180)
    assert world.events.count("SaveRequested") == 1
    assert world.events.count("SaveRequestAnswered") == 1


async def test_an_operator_without_the_kind_says_so() -> None:
    world = world_of(None)
    world.restart_operator(queued_resources=False)
    await world.run_until_settled()
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "QueuedResourcesDisabled")
