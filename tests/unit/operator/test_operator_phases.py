"""The phase tells one story: no word of a restart on the way to the end."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.kubelets import training_report
from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.decision import DeleteJobSet
from stepkeeper_operator.facts import read_jobset
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.planning.next_step import plan_next

OTHER_IMAGE: Final = {"spec": {"containers": [{"name": "trainer", "image": "trainer:2"}]}}


async def phases_until_complete(world: World) -> list[str]:
    """End the pods with code 0, one after the other, and look after each of all controllers' steps."""
    phases = []
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
        await world.reconcile()
        phases.append(str(world.phase()))
        world.now += 2
    for _ in range(4):
        world.controllers.sync()
        await world.reconcile()
        phases.append(str(world.phase()))
        world.now += 2
    assert world.phase() is Phase.COMPLETE
    return phases


@pytest.mark.parametrize("restarts", [0, 1])
async def test_a_job_whose_pods_exit_0_is_running_until_it_is_complete(restarts: int) -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    for _ in range(restarts):
        world.controllers.end_pod(world.pods[0], 1)
        await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert set(await phases_until_complete(world)) == {"Running", "Complete"}
    assert world.events[-1] == "Complete"


async def test_a_pod_that_fails_while_others_have_finished_is_a_restart() -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    first, second = world.pods
    world.controllers.end_pod(first, 0)
    await world.reconcile()
    world.now += 2
    world.controllers.end_pod(second, 1)
    await world.reconcile()
    assert world.phase() is Phase.RESTARTING


@pytest.mark.parametrize("code", [0, 1, 143])
async def test_an_attempt_ends_with_the_first_failure_or_the_last_pod_whoever_was_done_an_hour_before(
    code: int,
) -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    world.controllers.end_pod(world.pods[0], 0)
    await world.run_until_settled(rounds=2)
    world.now += 3600
    ended_at = world.now
    world.controllers.end_pod(world.pods[1], code)
    world.now += 1
    await world.run_until_settled(rounds=4)
    assert world.status.attempts[0].end == ended_at


async def test_reports_of_those_that_go_on_after_others_have_finished_are_seen_to_arrive() -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    world.receive_report(training_report(sequence=7, step=120))
    await world.reconcile()
    world.controllers.end_pod(world.pods[0], 0)
    for _ in range(30):
        world.now += 60
        world.receive_report(training_report(sequence=7, step=120), rank=1)
        await world.reconcile()
        assert world.condition("Running") == (ConditionStatus.FALSE, "Finishing")
        assert world.condition("Reporting") == (ConditionStatus.TRUE, "ReportsArrive")
    world.restart_operator()
    await world.reconcile()
    assert world.condition("Reporting") == (ConditionStatus.TRUE, "ReportsArrive")
    world.now += 3600
    await world.reconcile()
    assert world.condition("Reporting") == (ConditionStatus.FALSE, "NoReports")


@pytest.mark.parametrize("edit", [{"template": OTHER_IMAGE}, {"suspend": True}])
async def test_a_job_whose_pods_have_exited_0_is_complete_whatever_is_edited_meanwhile(
    edit: dict[str, Any],
) -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    world.controllers.sync()
    world.edit(**edit)
    await world.run_until_settled()
    assert world.condition("Complete") == (ConditionStatus.TRUE, "AllPodsSucceeded")
    assert world.phase() is Phase.COMPLETE
    assert world.causes == [None]
    assert world.status.bookkeeping.job_sets == 1


async def test_a_job_whose_jobset_is_deleted_when_its_pods_have_exited_0_is_complete() -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    world.controllers.sync()
    world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
    await world.run_until_settled()
    assert world.phase() is Phase.COMPLETE
    assert world.causes == [None]


async def test_a_pod_that_was_told_to_stop_and_replaced_keeps_no_job_from_its_end() -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    world.controllers.kubelets.stop_code = 0
    world.controllers.disrupt(world.pods[1], "EvictionByEvictionAPI")
    await world.run_until_settled(rounds=3)
    world.controllers.delete_job("lm-w-0")
    await world.run_until_settled(rounds=3)
    for pod in world.pods:
        world.controllers.end_pod(pod, 0)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.COMPLETE


@pytest.mark.parametrize(("cause", "complete"), [(None, True), ("QueuePreemption", False)])
async def test_nobody_knows_how_far_pods_were_that_exited_0_unseen_after_they_were_told_to_stop(
    cause: str | None, *, complete: bool
) -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    job, raw = world.job, world.jobset
    assert raw is not None
    ended = job.status.attempts[-1].model_copy(update={"end": int(world.now), "cause": cause})
    history = JobHistory(attempts=(ended,), restarts=job.status.restarts, bookkeeping=job.status.bookkeeping)
    jobset = replace(read_jobset(raw), completed=True)
    plan = plan_next(job, Observed(jobset=jobset), history, settings=world.settings, now=world.now)
    assert (plan.end is not None) is complete
    assert plan.actions == (() if complete else (DeleteJobSet(jobset=jobset),))
