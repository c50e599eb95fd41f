"""Test the controller of QueuedResources in stories: the shipped code, a cluster and a cloud in memory."""

import contextlib
from typing import Any

import pytest

from fake_cluster.resource_owners import JOINED, tell
from fake_cluster.resource_world import ResourceWorld, active
from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion
from stepkeeper_operator.errors import ApiError, InvalidObjectError, LeaseLostError
from stepkeeper_operator.queued_resources.settings import CloudSettings
from stepkeeper_operator.settings import OperatorSettings

SPOT: dict[str, Any] = {"tier": {"spot": {}}}
GUARANTEED: dict[str, Any] = {"tier": {"guaranteed": {}}}


async def test_it_is_created_provided_joined_and_then_nothing_is_written() -> None:
    world = await tell(await active(slices={"count": 2}), "created team-v5e, rests")
    assert world.status.joined == "2/2"
    states = [reason for reason in world.events if reason in set(QueuedResourceState)]
    assert (states[0], states[-1]) == ("Pending", "Active")
    assert len(set(states)) == len(states), "each state is told once"


async def test_once_the_lease_is_lost_nothing_more_is_asked_of_the_cloud() -> None:
    world = await tell(await active(), "delete")
    looks = 0

    def acting() -> bool:
        """Hold the lease at the first look of each reconcile, and lose it before the first write."""
        nonlocal looks
        looks += 1
        return looks == 1

    world.acting = acting
    for _ in range(20):
        looks = 0
        with contextlib.suppress(LeaseLostError):
            await world.reconcile()
        world.step(10)
    assert world.cloud.resources, "its deletion is the next operator's"
    world.acting = lambda: True
    await tell(world, "run 20, nothing-left")


async def test_a_deletion_lets_pods_end_and_leaves_nothing() -> None:
    world = await active()
    world.add_pod("team-v5e-w0")
    await tell(world, "delete, run 1")
    assert world.cluster.objects["nodes", None, "team-v5e-w0"]["spec"]["unschedulable"]
    assert world.cloud.resources, "the machines stay while the pod saves"
    await tell(world, "run 20, nothing-left")


@pytest.mark.parametrize("before", [True, False], ids=["before it", "after it"])
@pytest.mark.parametrize("write", range(12))
async def test_an_operator_killed_at_any_write_makes_no_second_resource(write: int, *, before: bool) -> None:
    world = ResourceWorld()
    world.kill_at, world.kill_before = write, before
    await tell(world, "run 12, created team-v5e, state Active")
    world.kill_at = write
    await tell(world, "delete, run 30, nothing-left")


async def test_a_preempted_node_brings_a_new_resource_after_the_old_one_is_gone() -> None:
    world = await active()
    world.cloud.set_quota("v5litepod", 8)
    await tell(world, "preempt, run 40, created team-v5e team-v5e-r1, there team-v5e-r1, recreations 1")
    await tell(world, f"{JOINED}, events Preempted 1, events QuotaExhausted 0")


async def test_while_nothing_is_requested_the_conditions_show_nothing_of_the_last_removal() -> None:
    backoff = {"initialSeconds": 900, "maxSeconds": 1800}
    world = await active(recreatePolicy={"onFailed": "Recreate", "backoff": backoff})
    world.cloud.set_nodes("PREEMPTED")
    await world.run(20)
    assert world.status.next_try_time is not None
    assert world.condition("Accepted") == ("Unknown", "NotAnswered")
    assert world.message("Accepted") == "no request is pending: see condition Active for the reason"
    assert "removed" not in world.message("Active")


async def test_a_script_that_is_missing_is_told_and_waited_for() -> None:
    world = ResourceWorld(slices={"startupScriptSecretRef": {"name": "join"}})
    await tell(world, "run 5, condition Accepted False/StartupScriptMissing, created")
    world.add_secret("#!/bin/sh\njoin")
    await world.run(10)
    (resource,) = world.cloud.resources.values()
    assert resource.node["metadata"]["startup-script"] == "#!/bin/sh\njoin"


async def test_lists_from_before_a_request_of_ours_are_not_believed_and_other_looks_share_one() -> None:
    world = ResourceWorld()
    while not world.cloud.created:
        await world.reconcile()
    before = world.cloud.count("ListQueuedResources")
    await world.reconcile()
    assert world.cloud.count("ListQueuedResources") == before + 1, "asked anew, though no time has passed"
    await world.run(12)
    before = world.cloud.count("ListQueuedResources")
    for _ in range(20):
        await world.reconcile()
    assert world.cloud.count("ListQueuedResources") <= before + 1


@pytest.mark.parametrize("readable", [True, False], ids=["", "operations can't be read"])
@pytest.mark.parametrize("spec", [SPOT, GUARANTEED], ids=["v2", "v2alpha1"])
async def test_the_cloud_is_listed_at_the_idle_pace_once_all_is_well(
    spec: dict[str, Any], *, readable: bool
) -> None:
    paces = OperatorSettings(cloud_tpu_poll_s=5, cloud_tpu_idle_poll_s=100)
    world = ResourceWorld(settings=CloudSettings.from_settings(paces), **spec)
    await tell(world, "run 60" if readable else "fail GetOperation PERMISSION_DENIED, run 60")
    await tell(world, JOINED)
    assert world.status.operation is None
    lists_before, ends_at = world.cloud.count("ListQueuedResources"), world.now + 2000
    while world.now < ends_at:
        wait_s = await world.reconcile()
        assert wait_s is not None
        world.now += min(wait_s, 7)  # something or other wakes it, more often than it wants
    assert 15 <= world.cloud.count("ListQueuedResources") - lists_before <= 23
    await tell(world, "delete, run 8, nothing-left")


async def test_a_deletion_goes_on_where_no_status_can_be_kept() -> None:
    world = await active()
    world.add_pod("team-v5e-w0")
    raw = world.raw
    assert raw is not None
    world.cluster.put("queuedresources", raw | {"spec": {"project": 1}})
    world.cluster.refusals["apply", "queuedresources"] = InvalidObjectError(422, "spec.project: not a string")
    world.delete()
    world.cluster.mark_deleted("pods", "team", "lm-w-0-0", grace_s=100_000)  # it never ends by itself
    await tell(world, "fail DeleteQueuedResource PERMISSION_DENIED, run 80, there team-v5e")
    asked = world.cloud.count("DeleteQueuedResource")
    assert 1 <= asked <= 10, (
        "the time for pods is bounded, and a refused deletion waits, without a status, too"
    )
    await tell(world, "recover, run 80, gone, there")


@pytest.mark.parametrize(
    "refusal",
    [
        ApiError(429, "disruption budget"),
        ApiError(500, "this pod has more than one PodDisruptionBudget"),
        InvalidObjectError(403, "admission webhook said no"),
    ],
    ids=["a budget forbids it", "two budgets cover it", "a webhook forbids it"],
)
async def test_an_eviction_that_is_refused_holds_nothing_up_for_ever(refusal: ApiError) -> None:
    world = await active()
    world.add_pod("team-v5e-w0")
    world.cluster.refusals["evict", "pods"] = refusal
    await tell(world, "delete, run 30, there team-v5e")
    assert sum(write.verb == "evict" for write in world.cluster.writes) > 1, "it is asked for again"
    await tell(world, "run 60, gone")


async def test_where_only_v2_answers_maintenance_and_autocheckpoint_are_unknown() -> None:
    world = ResourceWorld()
    world.cloud.inject_error("ListNodes", "PERMISSION_DENIED", None, version=ApiVersion.V2ALPHA1)
    await tell(world, f"run 12, {JOINED}, condition MaintenanceScheduled Unknown/NotReported")
    await tell(
        world, "message MaintenanceScheduled PERMISSION_DENIED, condition Degraded False/AsExpected, rests"
    )
    assert world.status.autocheckpoint == ""
