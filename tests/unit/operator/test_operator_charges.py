"""Test the party that an end is charged to: the application, the cluster, or whoever deleted a pod."""

from typing import Any

import pytest

from fake_cluster.kubelets import saved_message, termination_message, training_report
from fake_cluster.world import World
from stepkeeper.contract import ExitCode, ReportPhase
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase


async def running(**spec: Any) -> World:
    world = World(**spec)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
    return world


def kill_child_under_a_shell(world: World) -> None:
    """End the trainer by itself: nobody asked for it."""
    for pod in world.pods:
        world.controllers.end_pod(pod, 137)


def bury(world: World) -> None:
    """Let JobSet delete the dead pods: they get a deletionTimestamp."""
    world.now += 1
    for pod in world.pods:
        world.cluster.mark_deleted("pods", "default", pod["metadata"]["name"], grace_s=0)


async def test_a_trainer_that_ends_with_137_by_itself_is_charged_also_when_its_dead_pod_is_deleted() -> None:
    world = await running()
    kill_child_under_a_shell(world)
    await world.reconcile()
    bury(world)
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]
    assert [(e.cause, e.count) for e in world.status.restarts.by_cause] == [("ApplicationError", 1)]


async def test_an_operator_that_sees_only_the_buried_pod_charges_the_trainer_too() -> None:
    world = await running()
    world.stop_operator()
    kill_child_under_a_shell(world)
    world.now += 5
    bury(world)
    world.restart_operator()
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]


async def test_a_trainer_that_only_ever_ends_with_137_uses_up_its_restarts() -> None:
    world = await running(restarts={"maxFailures": 3})
    for _ in range(6):
        if world.phase() is not Phase.FAILED:
            kill_child_under_a_shell(world)
            await world.reconcile()
            bury(world)
            await world.run_until_settled(rounds=60)
    assert world.phase() is Phase.FAILED
    assert world.status.restarts.total == 3


async def test_pods_that_fail_without_any_word_are_started_again_ever_more_slowly_and_not_for_ever() -> None:
    world = await running()
    for _ in range(10):
        if world.phase() is Phase.RUNNING:
            for pod in world.pods:
                world.cluster.put("pods", pod | {"status": {"phase": "Failed"}})
            await world.reconcile()
            await world.run_until_settled(rounds=4)
            if len(world.causes) == 3 and world.causes[-1] is not None:
                assert world.phase() is Phase.RESTARTING
                assert world.status.bookkeeping.not_before == world.status.attempts[-1].start + 20
            world.now += 700
            await world.run_until_settled()
    assert world.phase() is Phase.SUSPENDED


async def test_a_lower_budget_ends_no_attempt_that_was_allowed_to_start() -> None:
    world = await running(spot=True)
    for _ in range(2):
        world.controllers.end_pod(world.pods[0], 1)
        await world.run_until_settled()
        world.preempt()
        await world.run_until_settled()
    world.now += 600
    world.edit(restarts={"maxFailures": 1, "maxDisruptions": 1})
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    assert world.condition("Failed") == (ConditionStatus.TRUE, "MaxFailuresReached")


async def test_a_fatal_code_behind_a_shell_ends_the_job_before_another_start() -> None:
    world = await running(restarts={"fatalExitCodes": [42]})
    world.controllers.end_pod(world.pods[0], 1, message=termination_message(42))
    await world.reconcile()
    assert world.condition("Failed") == (ConditionStatus.TRUE, "FatalExitCode")
    await world.run_until_settled()
    assert world.status.restarts.total == 0
    assert world.pods == []


async def test_a_fatal_code_behind_a_shell_ends_the_job_though_jobset_has_begun_the_next_start() -> None:
    world = await running(restarts={"fatalExitCodes": [42]})
    world.controllers.end_pod(world.pods[0], 1, message=termination_message(42))
    for _ in range(3):
        world.controllers.sync()
    await world.run_until_settled()
    assert world.condition("Failed") == (ConditionStatus.TRUE, "FatalExitCode")
    assert world.causes == ["ApplicationError", "Requested"]
    assert world.pods == []
    assert await world.record_writes(rounds=3) == []


async def test_the_notice_of_an_earlier_attempt_does_not_undo_a_completion() -> None:
    world = await running(spot=True)
    world.receive_report(training_report(sequence=7, step=120, phase=ReportPhase.SAVING, notice="sigterm"))
    await world.reconcile()
    world.preempt()
    await world.run_until_settled()
    for pod in world.pods:
        world.controllers.end_pod(pod, 0, message=termination_message(ExitCode.DONE, step=900))
    await world.run_until_settled()
    assert world.phase() is Phase.COMPLETE


async def test_of_two_restarts_that_came_at_once_each_is_charged_to_its_own_cause_and_stays_so() -> None:
    world = await running(spot=True)
    world.delay_watches("jobsets")
    world.preempt()
    world.controllers.sync()
    world.delay_watches("jobsets", "jobs", "pods")
    world.controllers.end_pod(world.pods[0], 1)
    world.controllers.sync()
    assert world.jobset is not None
    world.cache.record_jobset(world.jobset, deleted=False)
    for _ in range(2):
        world.now += 2
        await world.reconcile()
        assert world.causes == ["SpotPreemption", "ApplicationError", None]
    assert [(e.cause, e.count) for e in world.status.restarts.by_cause] == [
        ("ApplicationError", 1),
        ("SpotPreemption", 1),
    ]


async def test_restarts_that_were_guessed_are_charged_to_their_own_causes_when_the_watches_tell_of_them() -> (
    None
):
    world = await running(spot=True, restarts={"maxFailures": 1})
    world.delay_watches("pods", "jobs", "jobsets")
    world.preempt()
    world.controllers.sync()
    world.now += 2
    world.controllers.end_pod(world.pods[0], 1)
    world.controllers.sync()
    assert world.jobset is not None
    world.cache.record_jobset(world.jobset, deleted=False)
    await world.reconcile()
    assert world.causes[0] == "ApplicationError", "nobody can tell which of the two it was"
    world.deliver_watches()
    await world.run_until_settled(rounds=3)
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["SpotPreemption", "ApplicationError", None]
    assert [(e.cause, e.count) for e in world.status.restarts.by_cause] == [
        ("ApplicationError", 1),
        ("SpotPreemption", 1),
    ]


async def test_disruptions_count_towards_a_limit_only_where_there_is_one() -> None:
    world = await running(spot=True)
    world.preempt()
    await world.run_until_settled()
    assert [(e.count, e.counted_towards_limit) for e in world.status.restarts.by_cause] == [(1, 0)]
    world.edit(restarts={"maxDisruptions": 1})
    await world.run_until_settled(rounds=3)
    assert [(e.count, e.counted_towards_limit) for e in world.status.restarts.by_cause] == [(1, 1)]
    world.preempt()
    await world.run_until_settled()
    assert world.condition("Failed") == (ConditionStatus.TRUE, "MaxDisruptionsReached")


def delete_pod(world: World, index: int, *, code: int) -> None:
    """Delete a pod whose trainer then ends with that code."""
    name = world.pods[index]["metadata"]["name"]
    world.cluster.mark_deleted("pods", "default", name, grace_s=30)
    world.now += 2
    world.controllers.end_pod(world.pods[index], code)


async def test_a_trainer_that_exits_1_because_its_jobset_was_deleted_costs_no_failure() -> None:
    world = await running(restarts={"maxFailures": 0})
    world.controllers.kubelets.stop_code = 1
    world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
    for _ in range(4):
        world.now += 2
        world.controllers.step()
        await world.reconcile()
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["Requested", None]


async def test_a_sibling_that_exits_1_when_its_job_stops_it_changes_no_cause() -> None:
    world = await running()
    delete_pod(world, 0, code=143)
    await world.reconcile()
    assert world.causes == ["Requested"]
    delete_pod(world, 1, code=1)
    await world.run_until_settled()
    assert world.causes == ["Requested", None]


async def test_a_sibling_that_exits_1_after_a_lost_peer_is_not_the_failure() -> None:
    world = await running()
    world.receive_report(training_report(sequence=3, step=9))
    await world.reconcile()
    world.controllers.end_pod(world.pods[0], ExitCode.PEER_LOST)
    await world.reconcile()
    delete_pod(world, 1, code=1)
    await world.run_until_settled()
    assert world.causes == ["NodeFailure", None]


@pytest.mark.parametrize(("code", "cause"), [(1, "ApplicationError"), (78, "ApplicationError")])
async def test_a_failure_is_not_hidden_by_siblings_that_save_when_their_job_stops_them(
    code: int, cause: str
) -> None:
    world = await running()
    world.controllers.kubelets.stop_code = int(ExitCode.SAVED)
    world.controllers.kubelets.stop_message = saved_message(sequence=7, step=120)
    world.controllers.end_pod(world.pods[0], code)
    await world.run_until_settled()
    assert world.causes == [cause, None]


async def test_a_failure_is_charged_though_another_pod_saves_first_because_its_peers_stop() -> None:
    world = await running(restarts={"maxFailures": 0})
    told = termination_message(ExitCode.SAVED, notice="peer", step=120)
    world.controllers.end_pod(world.pods[0], int(ExitCode.SAVED), message=told)
    world.controllers.end_pod(world.pods[1], 1, message=termination_message(1, error="ValueError: bad"))
    await world.run_until_settled()
    assert world.causes[0] == "ApplicationError"
    assert world.condition("Failed") == (ConditionStatus.TRUE, "MaxFailuresReached")
    assert "ValueError: bad" in (world.status.attempts[0].message or "")


def fail_behind_a_peer(world: World) -> None:
    """Let one pod fail, and the other save first since its peer stops: JobSet counts no failure."""
    first, second = world.pods
    world.controllers.end_pod(first, 75, message=termination_message(75, notice="peer", step=120))
    world.controllers.end_pod(second, 1)


async def test_a_fatal_code_that_the_watches_tell_of_after_the_restart_ends_the_job() -> None:
    world = await running(restarts={"fatalExitCodes": [42]})
    world.delay_watches("pods", "jobs")
    world.controllers.end_pod(world.pods[0], 1, message=termination_message(42, error="ValueError: bad"))
    world.controllers.sync()
    await world.reconcile()
    assert world.causes == ["ApplicationError", None]
    world.deliver_watches()
    await world.run_until_settled()
    assert world.condition("Failed") == (ConditionStatus.TRUE, "FatalExitCode")
    assert "ValueError: bad" in (world.status.attempts[0].message or "")


@pytest.mark.parametrize("restarted", [False, True])
async def test_failures_that_jobset_does_not_count_wait_ever_longer(*, restarted: bool) -> None:
    waits = {"backoff": {"initialSeconds": 100, "maxSeconds": 300}, "maxFailures": 50}
    world = await running(restarts=waits)
    for wait_s in (100, 200, 300, 300):
        fail_behind_a_peer(world)
        failed_at = world.now
        await world.run_until_settled(rounds=3)
        assert world.pods == []
        assert world.phase() is Phase.RESTARTING
        if restarted:
            world.restart_operator()
        while world.phase() is not Phase.RUNNING:
            await world.run_until_settled(rounds=1)
        assert wait_s <= world.status.attempts[-1].start - failed_at < wait_s + 30
    assert world.causes == ["ApplicationError"] * 4 + [None]
    assert world.status.bookkeeping.job_sets == 1, "JobSet has restarted each in place"


async def test_a_start_that_jobset_began_after_the_last_one_allowed_ends_with_the_job() -> None:
    world = await running(restarts={"maxFailures": 0})
    fail_behind_a_peer(world)
    for _ in range(3):
        world.controllers.sync()
    await world.run_until_settled()
    assert world.condition("Failed") == (ConditionStatus.TRUE, "MaxFailuresReached")
    first, second = world.status.attempts
    assert (first.cause, second.cause) == ("ApplicationError", "Requested")
    assert first.end is not None
    assert second.end is not None
    assert second.message == "the job had no restart left"
    assert world.pods == []
    assert await world.record_writes(rounds=3) == []


async def test_a_notice_that_was_reported_explains_an_end_without_last_words() -> None:
    world = await running()
    world.receive_report(training_report(sequence=3, step=9, notice="file"))
    world.controllers.end_pod(world.pods[0], int(ExitCode.SAVED))
    await world.run_until_settled()
    assert world.causes == ["Requested", None]
    assert "after notice 'file'" in (world.status.attempts[0].message or "")


async def test_a_trainer_that_exits_1_before_its_deletion_and_a_fatal_code_after_it_are_its_own() -> None:
    world = await running()
    world.controllers.end_pod(world.pods[0], 1)
    world.now += 3
    bury(world)
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]
    world = await running(restarts={"fatalExitCodes": [42]})
    delete_pod(world, 0, code=42)
    await world.run_until_settled()
    assert world.condition("Failed") == (ConditionStatus.TRUE, "FatalExitCode")


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_taint_on_the_node_of_a_dead_pod_changes_no_cause_and_skips_no_back_off(
    *, restarted: bool
) -> None:
    world = await running(restarts={"backoff": {"initialSeconds": 600, "maxSeconds": 3600}})
    for _ in range(3):
        world.controllers.end_pod(world.pods[0], 1)
        await world.run_until_settled(rounds=4)
    before = world.status.bookkeeping.not_before
    assert before is not None
    world.now += 300 if restarted else 30
    dead = next(pod for pod in world.pods if pod["status"]["phase"] == "Failed")
    world.controllers.disrupt(dead, "DeletionByTaintManager")
    if restarted:
        world.restart_operator()
    await world.run_until_settled(rounds=6)
    assert world.causes == ["ApplicationError"] * 3
    assert world.status.bookkeeping.not_before == before
    assert world.phase() is Phase.RESTARTING


async def test_a_sidecar_that_outlives_the_trainer_is_named() -> None:
    world = await running()
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    side = {"name": "logger", "state": {"running": {}}}
    for pod in world.pods:
        world.cluster.put("pods", pod | {"status": pod["status"] | {"containerStatuses": [ended, side]}})
    await world.run_until_settled(rounds=3)
    assert world.condition("Running") == (ConditionStatus.FALSE, "TrainerEnded")
    running_ = next(c for c in world.status.conditions if c.type == "Running")
    assert "'logger'" in running_.message
    assert "restartPolicy: Always" in running_.message
    assert world.causes == [None]


@pytest.mark.parametrize("reason", ["EvictionByEvictionAPI", "PreemptionByScheduler"])
async def test_a_disruption_of_a_pod_that_is_being_deleted_for_a_failure_does_not_hide_it(
    reason: str,
) -> None:
    world = await running(restarts={"maxFailures": 1, "backoff": {"initialSeconds": 1}})
    world.controllers.kubelets.stop_s = 20
    for n_failures in (1, 2):
        world.controllers.end_pod(world.pods[0], 1)
        world.controllers.sync()
        await world.reconcile()
        world.now += 5
        world.controllers.disrupt(world.pods[1], reason)
        await world.run_until_settled(rounds=30)
        assert world.causes[:n_failures] == ["ApplicationError"] * n_failures
    assert world.condition("Failed") == (ConditionStatus.TRUE, "MaxFailuresReached")


@pytest.mark.parametrize(
    ("code", "reason", "said"),
    [(137, "OOMKilled", "used more memory"), (139, "Error", "exited with code 139")],
)
async def test_a_training_that_says_it_is_done_and_then_dies_has_failed(
    code: int, reason: str, said: str
) -> None:
    world = await running()
    for pod in world.pods:
        message = termination_message(ExitCode.DONE, step=1000)
        world.controllers.end_pod(pod, code, reason=reason, message=message)
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]
    assert said in (world.status.attempts[0].message or "")
