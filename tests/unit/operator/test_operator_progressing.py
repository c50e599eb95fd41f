"""Test condition Progressing: a training that makes no steps is seen and explained, and nothing is ended for it."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.kubelets import termination_message, training_report
from fake_cluster.stories import message_of, run_job, table
from fake_cluster.world import World
from stepkeeper.contract import ExitCode, ReportPhase
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.cluster import BATCH_JOBS

HOUR_S: Final = 3600
PROGRESSING: Final = "Progressing"
SILENT: Final = (ConditionStatus.UNKNOWN, "NoReports")
UNKNOWN: Final = (ConditionStatus.UNKNOWN, "NoStepYet")
ADVANCES: Final = (ConditionStatus.TRUE, "StepsAdvance")
STANDS: Final = (ConditionStatus.FALSE, "Stalled")
LEFT_ALONE: Final = (ConditionStatus.FALSE, "PartiallyFinished")


async def running(*steps: int, **spec: Any) -> World:
    """Run a job whose training makes these steps."""
    world = await run_job(**({"totalSteps": 10_000} | spec))
    for step in steps:
        await report(world, step)
    return world


async def report(world: World, step: int | None, *, after_s: float = 10, rank: int = 0, **more: Any) -> None:
    world.now += after_s
    world.receive_report(replace(training_report(8, 0), step=step, **({"commits": ()} | more)), rank=rank)
    await world.reconcile()


async def stand_still(world: World, step: int | None, duration_s: float, **more: Any) -> None:
    """Report the same step for so long."""
    until = world.now + duration_s
    while world.now < until:
        await report(world, step, after_s=min(60, until - world.now), **more)


async def be_silent(world: World, duration_s: float) -> None:
    world.now += duration_s
    await world.reconcile()


async def test_a_training_that_makes_no_step_for_half_an_hour_is_seen_until_its_next_step() -> None:
    world = await running(1, 2, 3)
    assert world.condition(PROGRESSING) == ADVANCES
    await stand_still(world, 3, 1799)
    assert world.condition(PROGRESSING) == ADVANCES
    await stand_still(world, 3, 1)
    assert world.condition(PROGRESSING) == STANDS
    message = message_of(world, PROGRESSING)
    assert message.startswith(
        "no step or commit was reported for 1800 s: the last is step 3 at 2027-01-15T09:00:38Z. "
    )
    for advice in ("kubectl -n default logs POD -c trainer", "kubectl -n default delete pod POD"):
        assert advice in message
    await stand_still(world, 3, HOUR_S)
    assert message_of(world, PROGRESSING) == message
    assert (world.phase(), world.causes) == (Phase.RUNNING, [None])
    assert world.events.count("Stalled") == 1
    assert b'stepkeeper_stalled{job="lm",namespace="default"} 1.0' in world.metrics.render()
    await report(world, 4)
    assert world.condition(PROGRESSING) == ADVANCES
    assert b'stepkeeper_stalled{job="lm",namespace="default"} 0.0' in world.metrics.render()


async def test_a_step_may_take_ten_times_as_long_as_the_longest_one_of_its_attempt() -> None:
    world = await running(1, 2, 3)
    await stand_still(world, 3, 500)
    await stand_still(world, 4, 10)
    await stand_still(world, 4, 5000)
    assert world.condition(PROGRESSING) == ADVANCES
    await stand_still(world, 4, 200)
    assert world.condition(PROGRESSING) == STANDS


@table(
    "steps, then",
    {
        "no step yet": ((), {"step": None}),
        "one step": ((1,), {"step": 1}),
        "a first step that compiles": ((1, 2), {"step": 2}),
        "an end": ((1, 2, 3), {"step": 3, "phase": ReportPhase.DONE}),
        "another restore": ((1, 2, 3), {"step": 3, "phase": ReportPhase.RESTORING}),
        "all steps made": ((9998, 9999, 10_000), {"step": 10_000}),
    },
)
async def test_nothing_is_expected_of_a_training_with(steps: tuple[int, ...], then: dict[str, Any]) -> None:
    world = await running(*steps)
    await stand_still(world, duration_s=HOUR_S, **then)
    assert world.condition(PROGRESSING) in {UNKNOWN, ADVANCES, (ConditionStatus.TRUE, "AllStepsMade")}
    assert "Stalled" not in world.events


async def test_a_commit_is_progress_too() -> None:
    world = await running(1, 2, 3)
    for sequence in range(9, 13):
        await stand_still(world, 3, 1000)
        await report(world, 3, commits=training_report(sequence, 3).commits)
    assert world.condition(PROGRESSING) == ADVANCES


@pytest.mark.parametrize(("stood_s", "found"), [(0, SILENT), (1800, STANDS)])
async def test_silence_is_no_standstill_and_ends_none(
    stood_s: int, found: tuple[ConditionStatus, str]
) -> None:
    world = await running(1, 2, 3)
    await stand_still(world, 3, stood_s)
    await be_silent(world, 5 * HOUR_S)
    assert world.condition("Reporting") == (ConditionStatus.FALSE, "NoReports")
    assert world.condition(PROGRESSING) == found
    await stand_still(world, 3, 100)
    assert world.condition(PROGRESSING) == STANDS, "by then it has stood still for hours"


@pytest.mark.parametrize("stop", ["preempted", "suspended"])
async def test_a_new_attempt_has_a_standstill_of_its_own_and_its_first_step_may_take_long(stop: str) -> None:
    world = await running(1, 2, 3)
    await stand_still(world, 3, 1800)
    if stop == "suspended":
        world.edit(suspend=True)
        await world.run_until_settled()
        assert world.condition(PROGRESSING) == (ConditionStatus.UNKNOWN, "NotRunning")
        world.edit(suspend=False)
    else:
        world.preempt()
    await world.run_until_settled(rounds=6)
    assert world.causes[-1] is None
    assert world.condition(PROGRESSING) == SILENT
    await stand_still(world, 3, 2 * HOUR_S)
    assert world.condition(PROGRESSING) == UNKNOWN


@pytest.mark.parametrize("stands", [False, True])
async def test_all_clocks_begin_with_the_operator_and_what_was_found_stands(*, stands: bool) -> None:
    world = await running(1, 2, 3)
    await stand_still(world, 3, 1900 if stands else 1700)
    world.restart_operator()
    assert await world.record_writes() == []
    await stand_still(world, 3, 1700)
    assert world.condition(PROGRESSING) == (STANDS if stands else ADVANCES)
    await stand_still(world, 3, 200)
    assert world.condition(PROGRESSING) == STANDS, "no step has to be seen by this operator first"
    assert world.events.count("Stalled") == 1
    world.restart_operator()
    await report(world, 4)
    assert world.condition(PROGRESSING) == ADVANCES


async def finish_one(world: World, index: int = 1) -> None:
    message = termination_message(ExitCode.DONE, step=900)
    world.controllers.end_pod(world.pods[index], int(ExitCode.DONE), message=message)
    await world.run_until_settled(rounds=2)
    assert world.condition("Running") == (ConditionStatus.FALSE, "Finishing")


@pytest.mark.parametrize("steps", [(), (1, 2, 3)])
async def test_pods_that_go_on_for_an_hour_after_another_is_done_are_seen_and_left_alone(
    steps: tuple[int, ...],
) -> None:
    world = await running(*steps)
    await finish_one(world)
    name = world.pods[1]["metadata"]["name"]
    await be_silent(world, HOUR_S - 60)
    assert world.condition(PROGRESSING) == SILENT
    await be_silent(world, 120)
    assert world.condition(PROGRESSING) == LEFT_ALONE
    assert f"1 of 2 pods have exited 0 ({name})" in message_of(world, PROGRESSING)
    assert (world.phase(), world.causes) == (Phase.RUNNING, [None])
    assert world.events.count("PartiallyFinished") == 1
    assert await world.record_writes(rounds=2) == []
    world.restart_operator()
    assert await world.record_writes(rounds=2) == []


async def test_pods_that_make_steps_or_commits_after_another_is_done_go_on() -> None:
    world = await running(1, 2, 3)
    await finish_one(world)
    await report(world, 4, after_s=HOUR_S - 60)
    await stand_still(world, 4, 120)
    assert world.condition(PROGRESSING) == ADVANCES
    await stand_still(world, 4, HOUR_S)
    assert world.condition(PROGRESSING) == LEFT_ALONE
    await report(world, 5)
    assert world.condition(PROGRESSING) == ADVANCES


async def test_pods_that_were_left_alone_and_all_run_again_are_not_left_alone_any_more() -> None:
    world = await running(placement={"tpu": {"accelerator": "v5p", "topology": "2x2x1", "slices": 2}})
    await finish_one(world)
    await be_silent(world, HOUR_S)
    assert world.condition(PROGRESSING) == LEFT_ALONE
    job = world.pods[1]["metadata"]["ownerReferences"][0]
    await world.cluster.delete(BATCH_JOBS, "default", job["name"], uid=job["uid"])
    await world.run_until_settled(rounds=4)
    assert world.condition("Running") == (ConditionStatus.TRUE, "AllPodsRun")
    assert world.condition(PROGRESSING) == SILENT
    assert await world.record_writes(rounds=2) == []


@pytest.mark.parametrize("left_alone", [False, True])
async def test_nothing_stands_still_any_more_once_the_last_pod_has_exited_0(*, left_alone: bool) -> None:
    world = await running(1, 2, 3)
    if left_alone:
        await finish_one(world, 0)
    await stand_still(world, 3, HOUR_S, rank=int(left_alone))
    assert world.condition(PROGRESSING) == (LEFT_ALONE if left_alone else STANDS)
    for pod in world.pods[int(left_alone) :]:
        world.controllers.end_pod(pod, 0)
    await be_silent(world, 1)
    assert world.phase() is Phase.RUNNING, "its Jobs have not counted them yet"
    assert world.condition(PROGRESSING) == ADVANCES


async def test_a_time_without_reports_counts_as_no_long_step() -> None:
    world = await running(1, 2, 3)
    await report(world, 2000, after_s=5 * HOUR_S)
    for step in (2001, 2002):
        await report(world, step)
    assert world.condition(PROGRESSING) == ADVANCES
    assert world.status.progress is not None
    assert world.status.progress.longest_step_millis == 10_000
    await stand_still(world, 2002, 1800)
    assert world.condition(PROGRESSING) == STANDS
