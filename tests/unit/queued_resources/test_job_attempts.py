"""Attempts of jobs whose machines go and come back while a pod's end is still being dealt with.

Whatever the order is: while pods run an attempt is open, and one loss of machines costs one restart.
"""

from typing import Any

import pytest

from fake_cluster.job_machines import change, machines, running, world_of
from fake_cluster.kubelets import training_report
from fake_cluster.world import World
from stepkeeper.contract import CommitPoint
from stepkeeper_operator.api.v1alpha1.conditions import Phase

NODES = ("n1", "n2", "n3", "n4")
SPOT: dict[str, Any] = {"spot": {}}
GONE: dict[str, Any] = {"tier": SPOT, "active": False, "joined": False, "state": "Suspended"}


async def lose(world: World) -> None:
    """Let the operator see that the machines are gone, before the cluster does anything about it."""
    world.cluster.put("queuedresources", machines(**GONE))
    await world.reconcile()


async def bring_back(world: World, uid: str = "uid-a") -> None:
    """Let the operator see machines of the resource, before the cluster does anything about it."""
    world.cluster.put("queuedresources", machines(tier=SPOT, uid=uid))
    await world.reconcile()


def let_time_pass(world: World) -> None:
    world.now += 5


async def settle(world: World) -> None:
    world.controllers.stuck.clear()
    world.controllers.gone.clear()
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert all(pod["status"]["phase"] == "Running" for pod in world.pods)
    assert world.causes == ["SpotPreemption", None], "pods run, so that an attempt is open"
    assert [(entry.cause, entry.count) for entry in world.status.restarts.by_cause] == [("SpotPreemption", 1)]
    assert await world.record_writes(rounds=3) == []


@pytest.mark.parametrize("code", [1, 75, 143])
@pytest.mark.parametrize("uid", ["uid-a", "uid-b"])
async def test_an_end_that_its_job_has_not_seen_when_the_machines_go(code: int, uid: str) -> None:
    world = await running(tier=SPOT)
    world.controllers.end_pod(world.pods[0], code)
    await world.reconcile()
    let_time_pass(world)
    await lose(world)
    world.controllers.sync()
    let_time_pass(world)
    await bring_back(world, uid)
    await settle(world)


@pytest.mark.parametrize("code", [1, 75, 143])
@pytest.mark.parametrize("uid", ["uid-a", "uid-b"])
async def test_an_end_that_its_job_acts_on_while_the_machines_are_gone(code: int, uid: str) -> None:
    world = await running(tier=SPOT)
    world.controllers.end_pod(world.pods[0], code)
    world.controllers.notice_failures()
    await world.reconcile()
    let_time_pass(world)
    await lose(world)
    await world.run_until_settled(rounds=3)
    assert world.pods == []
    await bring_back(world, uid)
    await settle(world)


@pytest.mark.parametrize("code", [1, 75, 143])
async def test_an_end_that_its_job_acts_on_only_once_the_machines_are_back(code: int) -> None:
    world = await running(tier=SPOT)
    world.controllers.end_pod(world.pods[0], code)
    world.controllers.stuck.add(world.pods[1]["spec"]["nodeName"])
    world.controllers.notice_failures()
    await world.reconcile()
    let_time_pass(world)
    await lose(world)
    world.controllers.sync()
    let_time_pass(world)
    await bring_back(world)
    await world.reconcile()
    world.controllers.sync()
    await world.reconcile()
    await settle(world)


async def test_machines_that_are_back_before_anything_was_stopped() -> None:
    world = await running(tier=SPOT)
    world.preempt()
    await world.reconcile()
    await lose(world)
    await bring_back(world)
    await settle(world)


@pytest.mark.parametrize("restarted", [False, True])
async def test_an_end_that_is_seen_together_with_the_loss(*, restarted: bool) -> None:
    world = await running(tier=SPOT)
    world.controllers.end_pod(world.pods[0], 1)
    await lose(world)
    if restarted:
        world.restart_operator()
    let_time_pass(world)
    await world.run_until_settled(rounds=3)
    await bring_back(world)
    await settle(world)


async def test_an_operator_that_was_away_while_the_job_was_suspended_finds_its_attempt() -> None:
    world = await running(tier=SPOT)
    world.controllers.end_pod(world.pods[0], 1)
    await world.reconcile()
    let_time_pass(world)
    await lose(world)
    world.stop_operator()
    world.controllers.sync()
    let_time_pass(world)
    world.cluster.put("queuedresources", machines(tier=SPOT))
    world.restart_operator()
    await settle(world)


async def test_an_attempt_after_a_suspension_by_the_user_that_met_a_failure() -> None:
    world = await running(tier=SPOT)
    world.controllers.end_pod(world.pods[0], 1)
    await world.reconcile()
    let_time_pass(world)
    world.edit(suspend=True)
    await world.run_until_settled(rounds=3)
    world.edit(suspend=False)
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]
    assert world.status.restarts.total == 1
    await change(world, **GONE)
    await change(world, tier=SPOT)
    assert world.causes == ["ApplicationError", "SpotPreemption", None]
    assert world.status.restarts.total == 2


async def test_machines_that_go_before_the_first_pod_has_run() -> None:
    world = world_of(machines(tier=SPOT))
    world.controllers.gone.update(NODES)
    await world.run_until_settled(rounds=3)
    assert world.causes == [None]
    await change(world, **GONE)
    assert world.causes == []
    world.controllers.gone.clear()
    await change(world, tier=SPOT)
    assert world.causes == [None]
    assert world.phase() is Phase.RUNNING
    assert world.status.restarts.total == 0


async def test_a_restart_of_pods_of_which_none_was_an_attempt() -> None:
    world = world_of(machines(tier=SPOT))
    world.controllers.gone.update(NODES)
    await world.run_until_settled(rounds=3)
    await change(world, **GONE)
    assert world.causes == []
    jobset = world.jobset
    assert jobset is not None
    world.cluster.put("jobsets", jobset | {"status": jobset["status"] | {"restarts": 1}})
    await world.reconcile()
    world.controllers.gone.clear()
    await change(world, tier=SPOT)
    assert world.causes == [None]
    assert world.status.restarts.total == 0


async def test_a_report_from_before_a_suspension_says_nothing_of_the_attempt_after_it() -> None:
    world = await running(tier=SPOT)
    restored = CommitPoint(sequence=3, step=40)
    world.receive_report(training_report(sequence=5, step=100, restored=restored, in_flight_step=110))
    await world.reconcile()
    let_time_pass(world)
    await change(world, **GONE)
    await change(world, tier=SPOT)
    first, second = world.status.attempts
    assert (first.from_step, first.to_step) == (40, 100)
    assert (second.from_step, second.to_step) == (None, None)
    checkpoint = world.status.checkpoint
    assert checkpoint is not None
    assert checkpoint.latest is not None
    assert (checkpoint.restored, checkpoint.in_flight_step) == (None, None)


@pytest.mark.parametrize("together", [True, False])
async def test_a_restart_that_has_made_no_pod_when_the_machines_go_is_no_attempt(*, together: bool) -> None:
    world = await running(tier=SPOT)
    world.controllers.disrupt(world.pods[0], "TerminationByKubelet")
    world.controllers.end_pod(world.pods[0], 75)
    await world.reconcile()
    let_time_pass(world)
    jobset = world.jobset
    assert jobset is not None
    for plural in ("pods", "jobs"):
        for raw in world.cluster.list_objects(plural):
            world.cluster.remove(plural, raw["metadata"]["namespace"], raw["metadata"]["name"])
    world.cluster.put("jobsets", jobset | {"status": jobset.get("status", {}) | {"restarts": 1}})
    if not together:
        await world.reconcile()
    await lose(world)
    world.controllers.sync()
    let_time_pass(world)
    await world.run_until_settled(rounds=3)
    assert world.causes == ["SpotPreemption"]
    await bring_back(world)
    await settle(world)


async def test_pods_that_are_made_when_the_machines_are_gone_already_are_no_attempt() -> None:
    world = await running(tier=SPOT)
    world.controllers.end_pod(world.pods[0], 1)
    await world.reconcile()
    let_time_pass(world)
    world.controllers.gone.update(NODES)
    world.controllers.sync()
    await world.reconcile()
    assert world.causes == ["ApplicationError", None]
    await change(world, **GONE)
    assert world.phase() is Phase.SUSPENDED
    await bring_back(world)
    await settle(world)


async def test_pods_that_run_on_the_machines_that_are_left_are_no_attempt() -> None:
    world = await running(tier=SPOT)
    world.controllers.end_pod(world.pods[0], 1)
    await world.reconcile()
    let_time_pass(world)
    world.controllers.gone.add(world.pods[1]["spec"]["nodeName"])
    world.controllers.sync()
    await world.reconcile()
    assert sorted(pod["status"]["phase"] for pod in world.pods) == ["Pending", "Running"]
    await change(world, **GONE)
    await bring_back(world)
    await settle(world)


async def test_pods_that_fail_on_the_machines_that_are_left_when_the_loss_is_seen_are_no_attempt() -> None:
    world = await running(tier=SPOT)
    world.controllers.end_pod(world.pods[0], 1)
    await world.reconcile()
    let_time_pass(world)
    world.controllers.gone.add(world.pods[1]["spec"]["nodeName"])
    world.controllers.sync()
    await world.reconcile()
    assert world.causes == ["ApplicationError", None]
    world.controllers.end_pod(next(p for p in world.pods if p["status"]["phase"] == "Running"), 1)
    await lose(world)
    assert world.causes == ["SpotPreemption"]
    let_time_pass(world)
    await world.run_until_settled(rounds=3)
    await bring_back(world)
    await settle(world)


async def test_pods_that_are_made_while_the_machines_are_thought_gone_for_a_moment_are_one() -> None:
    world = await running(tier=SPOT)
    world.controllers.gone.update(NODES)
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled(rounds=2)
    assert world.causes == ["ApplicationError", None]
    await lose(world)
    await bring_back(world)
    await settle(world)


async def test_a_hang_is_not_judged_by_the_pods_of_an_attempt_that_was_none() -> None:
    world = await running(tier=SPOT)
    world.controllers.disrupt(world.pods[0], "stepkeeper.dev/Hang")
    hang = {"type": "stepkeeper.dev/Hang", "status": "True", "reason": "NoProgress"}
    world.cluster.put("pods", world.pods[0] | {"status": world.pods[0]["status"] | {"conditions": [hang]}})
    world.controllers.end_pod(world.pods[0], 143)
    await world.reconcile()
    let_time_pass(world)
    world.controllers.gone.add(world.pods[1]["spec"]["nodeName"])
    world.controllers.sync()
    await world.reconcile()
    assert world.causes == ["Hang", None]
    await lose(world)
    world.controllers.end_pod(next(p for p in world.pods if p["status"]["phase"] == "Running"), 1)
    await world.reconcile()
    await change(world, **GONE)
    assert world.causes == ["Hang"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_survivor_that_failed_before_the_loss_was_seen_costs_no_failure(*, restarted: bool) -> None:
    world = await running(tier=SPOT)
    world.controllers.gone.add(world.pods[1]["spec"]["nodeName"])
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled(rounds=3)
    assert [(e.cause, e.counted_towards_limit) for e in world.status.restarts.by_cause] == [
        ("ApplicationError", 1)
    ]
    if restarted:
        world.restart_operator()
    await change(world, **GONE)
    assert world.causes == ["SpotPreemption"]
    assert world.status.restarts.total == 0
    assert "CauseCorrected" in world.events
    first = world.status.attempts[0].message or ""
    assert "exited with code 1" in first
    assert "QueuedResource pod-a are gone" in first
    await bring_back(world)
    await settle(world)
    assert world.status.restarts.by_cause[0].counted_towards_limit == 0


async def test_machines_that_go_long_after_an_end_explain_nothing_though_a_pod_of_it_still_stops() -> None:
    world = await running(tier=SPOT)
    world.controllers.stuck.add(world.pods[1]["spec"]["nodeName"])
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled(rounds=3)
    assert world.causes == ["ApplicationError"]
    world.now += world.settings.reattribution_s + 10
    await lose(world)
    assert world.causes == ["ApplicationError"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_jobset_that_survivors_have_failed_does_not_end_the_job(*, restarted: bool) -> None:
    world = await running(tier=SPOT, restarts={"maxFailures": 0})
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled(rounds=20)
    assert world.jobset is not None
    assert world.jobset["status"]["conditions"][-1]["type"] == "Failed"
    assert world.phase() is Phase.RESTARTING
    if restarted:
        world.restart_operator()
    await change(world, **GONE)
    assert world.phase() is Phase.SUSPENDED
    await change(world, tier=SPOT)
    await settle(world)
