"""Test what becomes of pods that go on when another one of their attempt is done."""

from typing import Any, Final

import pytest

from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.testing import World, saved_message, termination_message, training_report

HOUR_S: Final = 3600
DONE: Final = termination_message(ExitCode.DONE, step=900)


async def half_done(*, reported: bool = True, **spec: Any) -> World:
    """Make a job whose second host is done, and whose first one goes on."""
    world = World(**spec)
    await world.run_until_settled(rounds=4)
    if reported:
        world.receive_report(training_report(sequence=8, step=800))
        await world.reconcile()
    message = DONE if reported else ""
    world.controllers.end_pod(world.pods[1], int(ExitCode.DONE), message=message)
    await world.run_until_settled(rounds=2)
    assert world.phase() is Phase.RUNNING
    assert world.condition("Running") == (ConditionStatus.FALSE, "Finishing")
    return world


async def let_pass(world: World, duration_s: float) -> None:
    """Let time pass as the operator asks to be called again."""
    ends_at = world.now + duration_s
    while world.now < ends_at:
        again_s = await world.reconcile()
        world.controllers.sync()
        world.now = min(ends_at, world.now + max(again_s or 600.0, 0.05))
    await world.run_until_settled(rounds=3)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_host_that_makes_no_step_for_an_hour_after_another_was_done_is_started_again(
    *, restarted: bool
) -> None:
    world = await half_done(restarts={"maxFailures": 0})
    await let_pass(world, HOUR_S - 60)
    assert world.causes == [None]
    if restarted:
        world.restart_operator()
        await let_pass(world, HOUR_S - 60)
        assert world.causes == [None], "it may have made steps while nobody watched"
    await let_pass(world, 60)
    await world.run_until_settled()
    assert world.causes == ["Hang", None]
    assert world.phase() is Phase.RUNNING
    assert [entry.counted_towards_limit for entry in world.status.restarts.by_cause] == [0]
    assert len([pod for pod in world.pods if pod["status"]["phase"] == "Running"]) == 2
    assert await world.record_writes(rounds=3) == []


@pytest.mark.parametrize("commits", [False, True])
async def test_a_host_that_makes_steps_or_commits_goes_on(*, commits: bool) -> None:
    world = await half_done()
    for n in range(4):
        await let_pass(world, HOUR_S / 2)
        sequence, step = (9 + n, 800) if commits else (8, 801 + n)
        world.receive_report(training_report(sequence=sequence, step=step))
        await world.reconcile()
    assert world.causes == [None]
    assert [pod["status"]["phase"] for pod in world.pods] == ["Running", "Succeeded"]


async def test_a_program_that_never_reports_a_step_goes_on_for_as_long_as_it_likes() -> None:
    world = await half_done(reported=False)
    await let_pass(world, 3 * HOUR_S)
    assert world.causes == [None]


async def test_hosts_of_which_none_is_done_go_on() -> None:
    world = World()
    await world.run_until_settled(rounds=4)
    world.receive_report(training_report(sequence=8, step=800))
    await let_pass(world, 3 * HOUR_S)
    assert world.causes == [None]


async def test_a_host_that_saves_when_it_is_ended_for_its_hang_loses_nothing() -> None:
    world = await half_done()
    world.controllers.kubelets.stop_code = int(ExitCode.SAVED)
    world.controllers.kubelets.stop_message = saved_message(sequence=9, step=810)
    await let_pass(world, HOUR_S)
    await world.run_until_settled()
    assert world.causes == ["Hang", None]
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.latest is not None
    assert world.status.checkpoint.latest.sequence == 9


async def test_hosts_that_exit_0_when_they_are_ended_for_their_hang_are_started_again() -> None:
    world = await half_done()
    world.controllers.kubelets.stop_code = 0
    await let_pass(world, HOUR_S)
    await world.run_until_settled()
    assert world.causes == ["Hang", None]
    assert world.phase() is Phase.RUNNING
