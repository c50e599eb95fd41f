"""Test that an attempt is open while pods run, and that a job is called suspended only once they have ended."""

import pytest

from fake_cluster.kubelets import saved_message, training_report
from fake_cluster.world import running
from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase


@pytest.mark.parametrize("code", [1, 143, int(ExitCode.SAVED), 0])
async def test_a_job_that_jobset_made_anew_by_itself_is_an_attempt_whose_reports_and_failures_are_its_own(
    code: int,
) -> None:
    world = await running()
    world.controllers.kubelets.stop_s = 5
    world.controllers.kubelets.stop_code = code
    world.controllers.delete_job("lm-w-0")
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes[-1] is None
    n_attempts = len(world.causes)
    assert n_attempts == (1 if code == 0 else 2)
    world.now += 600
    world.receive_report(training_report(sequence=3, step=30))
    await world.run_until_settled(rounds=3)
    assert world.status.attempts[-1].to_step == 30
    assert world.condition("Reporting") == (ConditionStatus.TRUE, "ReportsArrive")
    world.controllers.end_pod(world.pods[0], 1)
    await world.run_until_settled()
    assert world.causes[n_attempts - 1 :] == ["ApplicationError", None]
    assert await world.record_writes(rounds=3) == []


@pytest.mark.parametrize("stop_s", [0, 5])
@pytest.mark.parametrize("deleted_unseen", [False, True])
async def test_pods_that_others_took_the_places_of_explain_no_end_of_those(
    stop_s: int, *, deleted_unseen: bool
) -> None:
    world = await running()
    world.controllers.kubelets.stop_s = stop_s
    world.controllers.kubelets.stop_code = 0
    world.controllers.disrupt(world.pods[1], "EvictionByEvictionAPI")
    if not deleted_unseen:
        await world.run_until_settled(rounds=3)
    world.controllers.delete_job("lm-w-0")
    await world.run_until_settled()
    assert world.causes == [None], "pods that exit 0 end no attempt"
    world.now += 600
    world.controllers.end_pod(world.pods[0], 1)
    failed_at = world.now
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]
    assert world.status.attempts[0].end == failed_at


async def test_a_slice_that_is_done_hides_no_job_that_jobset_made_anew() -> None:
    world = await running(placement={"tpu": {"accelerator": "v5p", "topology": "2x2x2", "slices": 2}})
    world.controllers.end_pod(world.pods[-1], 0)
    world.controllers.delete_job("lm-w-0")
    await world.run_until_settled()
    assert world.causes == ["Requested", None]
    assert world.phase() is Phase.RUNNING
    world.receive_report(training_report(sequence=3, step=30))
    await world.run_until_settled(rounds=3)
    assert world.status.attempts[-1].to_step == 30


@pytest.mark.parametrize("code", [1, 143, int(ExitCode.SAVED)])
@pytest.mark.parametrize("late", [False, True])
async def test_a_suspension_costs_nothing_however_its_pods_end_and_whenever_jobset_says_so(
    code: int, *, late: bool
) -> None:
    world = await running(restarts={"maxFailures": 0})
    world.controllers.kubelets.stop_code = code
    if code == ExitCode.SAVED:
        world.controllers.kubelets.stop_message = saved_message(sequence=4, step=44)
    world.edit(suspend=True)
    await world.reconcile()
    if late:
        world.delay_watches("jobsets")
    world.now += 2
    world.controllers.sync()
    await world.reconcile()
    world.deliver_watches()
    await world.run_until_settled()
    assert world.phase() is Phase.SUSPENDED
    world.edit(suspend=False)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["Requested", None]
    assert world.status.attempts[0].message == "suspended"


async def test_a_job_is_suspending_until_its_last_pod_has_ended_and_what_it_saves_meanwhile_is_shown() -> (
    None
):
    world = await running()
    world.controllers.kubelets.stop_s = 20
    world.controllers.kubelets.stop_code = int(ExitCode.SAVED)
    world.edit(suspend=True)
    await world.run_until_settled(rounds=5)
    assert world.jobset is not None
    assert world.jobset["status"]["conditions"][0]["type"] == "Suspended"
    assert world.phase() is Phase.SUSPENDING
    assert world.condition("Suspended") == (ConditionStatus.FALSE, "Suspending")
    assert "2 of its pods" in world.message("Suspended")
    assert world.causes == [None], "its pods run down"
    world.receive_report(training_report(sequence=9, step=90))
    await world.reconcile()
    assert world.latest == (9, 90)
    world.now += 20
    await world.run_until_settled()
    assert world.phase() is Phase.SUSPENDED
    assert world.causes == ["Requested"]
    assert world.events.count("Suspending") == world.events.count("Suspended") == 1


@pytest.mark.parametrize("code", [1, 143])
async def test_a_job_that_is_resumed_before_its_last_pod_has_ended_runs_as_one_new_attempt(code: int) -> None:
    world = await running(restarts={"maxFailures": 0})
    world.controllers.kubelets.stop_s = 20
    world.controllers.kubelets.stop_code = code
    world.edit(suspend=True)
    await world.run_until_settled(rounds=3)
    world.edit(suspend=False)
    await world.run_until_settled(rounds=20)
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["Requested", None]
    assert world.status.restarts.total == 1
    assert await world.record_writes(rounds=3) == []


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_failure_just_before_a_suspension_is_one_restart_when_the_job_is_resumed(
    *, restarted: bool
) -> None:
    world = await running()
    world.controllers.end_pod(world.pods[0], 1)
    world.edit(suspend=True)
    await world.reconcile()
    if restarted:
        world.restart_operator()
    await world.run_until_settled(rounds=5)
    assert world.phase() is Phase.SUSPENDED
    world.edit(suspend=False)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes == ["ApplicationError", None]
    assert world.status.restarts.total == 1


async def test_a_resumed_job_has_an_attempt_before_its_first_pod_is_seen() -> None:
    world = await running()
    world.edit(suspend=True)
    await world.run_until_settled()
    assert world.causes == ["Requested"]
    world.delay_watches("pods")
    world.edit(suspend=False)
    await world.run_until_settled(rounds=4)
    assert world.causes == ["Requested", None]
    world.deliver_watches()
    await world.run_until_settled(rounds=4)
    assert world.causes == ["Requested", None]
    assert world.phase() is Phase.RUNNING


async def test_commits_and_steps_are_shown_though_the_clock_has_gone_back() -> None:
    world = await running()
    world.receive_report(training_report(sequence=3, step=100))
    world.now += 20
    await world.reconcile()
    world.now -= 3600
    for step in (200, 300):
        world.receive_report(training_report(sequence=step, step=step))
        await world.reconcile()
        world.now += 61
    assert world.latest == (300, 300)
    assert world.status.attempts[-1].to_step == 300
