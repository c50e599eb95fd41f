"""Test that an attempt is open while pods run, and that a job is called suspended only once they have ended."""

import pytest

from fake_cluster.kubelets import saved_message, training_report
from fake_cluster.world import running
from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase


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
