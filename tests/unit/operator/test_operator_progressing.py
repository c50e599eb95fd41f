"""Test condition Progressing: a training that makes no steps is noticed and explained, and no pod is ended."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.kubelets import termination_message, training_report
from fake_cluster.stories import play, run_job, stories
from fake_cluster.world import World
from stepkeeper.contract import ExitCode, ReportPhase
from stepkeeper_operator.cache.reports import TrainerStatus
from stepkeeper_operator.cluster.resources import BATCH_JOBS

HOUR_S: Final = 3600
FIELDS: Final[dict[str, dict[str, Any]]] = {
    "done": {"phase": ReportPhase.DONE},
    "restoring": {"phase": ReportPhase.RESTORING},
}
REASONS: Final = {
    "silent": "Unknown/NoReports",
    "unknown": "Unknown/NoStepYet",
    "not-running": "Unknown/NotRunning",
    "advances": "True/StepsAdvance",
    "all-made": "True/AllStepsMade",
    "stands": "False/Stalled",
    "left-alone": "False/PartiallyFinished",
}
FIRST: Final = "step 1, step 2, step 3"


async def report(world: World, step: int | None, *, after_s: float = 10, rank: int = 0, **more: Any) -> None:
    world.now += after_s
    world.receive_report(replace(training_report(8, 0), step=step, **({"commits": ()} | more)), rank=rank)
    await world.reconcile()


async def report_commit(world: World, number: str, step: str) -> None:
    (commit,) = training_report(int(number), int(step)).commits
    await report(world, int(step), commits=(replace(commit, time_unix_s=int(world.now)),))


async def stand(world: World, step: str, duration_s: str, rank: str = "0", phase: str = "") -> None:
    """Report the same step for so long; `none` is none."""
    until = world.now + float(duration_s)
    number = None if step == "none" else int(step)
    while world.now < until:
        after_s = min(60, until - world.now)
        await report(world, number, after_s=after_s, rank=int(rank), **FIELDS.get(phase, {}))


async def finish_one(world: World, index: str = "1") -> None:
    message = termination_message(ExitCode.DONE, step=900)
    world.controllers.end_pod(world.pods[int(index)], int(ExitCode.DONE), message=message)
    await play(world, "run 2, condition Running False/Finishing")


def check(world: World, word: str) -> None:
    status, reason = world.condition("Progressing") or ("", "")
    assert f"{status}/{reason}" == REASONS[word], reason


async def tell(story: str, world: World | None = None, **spec: Any) -> World:
    """Play a story of reports of a running job."""
    return await play(
        world or await run_job(**({"totalSteps": 10_000} | spec)),
        story,
        step=lambda world, step, after_s="10": report(world, int(step), after_s=float(after_s)),
        commit=report_commit,
        stand=stand,
        finish=finish_one,
        it=check,
    )


async def test_a_training_that_makes_no_step_for_half_an_hour_is_seen_until_its_next_step() -> None:
    world = await tell(f"{FIRST}, it advances, stand 3 1799, it advances, stand 3 1, it stands")
    message = world.message("Progressing")
    last = "the last is step 3 at 2027-01-15T09:00:38Z. "
    assert message.startswith(f"no step or commit was reported for 1800 s: {last}")
    for advice in ("kubectl -n default logs POD -c trainer", "kubectl -n default delete pod POD"):
        assert advice in message
    await tell("stand 3 3600, phase Running, causes -, events Stalled 1", world)
    assert world.message("Progressing") == message
    assert b'stepkeeper_stalled{job="lm",namespace="default"} 1.0' in world.metrics.render()
    await tell("step 4, it advances", world)
    assert b'stepkeeper_stalled{job="lm",namespace="default"} 0.0' in world.metrics.render()


@stories(
    {
        "a step ten times as long as the longest": (
            f"{FIRST}, stand 3 500, stand 4 10, stand 4 5000, it advances, stand 4 200, it stands"
        ),
        "no step yet": "stand none 3600, it unknown",
        "one step": "step 1, stand 1 3600, it unknown",
        "a first step that compiles": "step 1, step 2, stand 2 3600, it unknown",
        "an end": f"{FIRST}, stand 3 3600 0 done, it all-made",
        "another restore": f"{FIRST}, stand 3 3600 0 restoring, it advances",
        "all steps made": "step 9998, step 9999, step 10000, stand 10000 3600, it all-made",
        "the last step after a standstill": (
            "step 9997, step 9998, step 9999, stand 9999 1800, it stands, step 10000, it all-made"
        ),
        "commits": (
            f"{FIRST}, stand 3 1000, commit 9 3, stand 3 1000, commit 10 3, stand 3 1000, commit 11 3, it advances"
        ),
        "silence": (
            f"{FIRST}, wait 18000, look, condition Reporting False/NoReports, it silent, stand 3 100, it stands"
        ),
        "silence after a standstill": (
            f"{FIRST}, stand 3 1800, wait 18000, look, condition Reporting False/NoReports, it stands"
        ),
        "steps of pods after one is done": (
            f"{FIRST}, finish, step 4 3540, stand 4 120, it advances, stand 4 3600, it left-alone, step 5, it advances"
        ),
        "an operator that starts before a standstill": (
            f"{FIRST}, stand 3 1700, restart, rests, stand 3 90, it advances, stand 3 20, it stands, "
            "events Stalled 1, restart, step 4, it advances"
        ),
        "an operator that starts in a standstill": (
            f"{FIRST}, stand 3 1900, restart, rests, stand 3 1700, it stands, stand 3 200, it stands, "
            "events Stalled 1, restart, step 4, it advances"
        ),
        "operators that start again and again": (
            f"{FIRST}, stand 3 600, restart, stand 3 600, restart, stand 3 580, it advances, restart, stand 3 40, "
            "it stands"
        ),
        "a standstill while no operator is up": (
            f"{FIRST}, stand 3 60, wait 7200, restart, rests, it advances, stand 3 10, it stands, events Stalled 1"
        ),
        "steps while no operator is up": (
            f"{FIRST}, stand 3 60, wait 7200, restart, step 900, it advances, stand 900 1780, it advances, "
            "stand 900 30, it stands"
        ),
        "a commit before an operator starts": (
            f"{FIRST}, stand 3 1700, commit 9 3, restart, stand 3 1780, it advances, stand 3 20, it stands"
        ),
        "a step that goes backwards": (
            f"{FIRST}, stand 3 1700, step 2, stand 2 80, it advances, stand 2 20, it stands, step 1, it stands, "
            "step 2, it advances"
        ),
        "steps of pods after one is done, and an operator that starts later": (
            f"{FIRST}, finish, step 4 3540, wait 3500, restart, look, it advances, step 5 60, it advances"
        ),
        "the next attempt after a preemption": (
            f"{FIRST}, stand 3 1800, it stands, preempt, run 6, it silent, stand 3 7200, it unknown"
        ),
        "the next attempt after a suspension": (
            f"{FIRST}, stand 3 1800, it stands, suspend, run, it not-running, resume, run 6, it silent, "
            "stand 3 7200, it unknown"
        ),
        # Its Jobs have not counted them yet.
        "the end after a standstill": (
            f"{FIRST}, stand 3 3600, it stands, fail 0 0, fail 0 1, wait 1, look, phase Running, it advances"
        ),
        "the end after one was done": (
            f"{FIRST}, finish 0, stand 3 3600 1, it left-alone, fail 0 1, wait 1, look, phase Running, it advances"
        ),
    },
)
async def test_a_training_advances_stands_or_is_not_known_to(story: str) -> None:
    world = await tell(story)
    assert "it stands" in story or "Stalled" not in world.events


@pytest.mark.parametrize("before", ["", f"{FIRST}, "])
async def test_pods_that_go_on_for_an_hour_after_another_is_done_are_seen_and_left_alone(before: str) -> None:
    world = await tell(f"{before}finish")
    name = world.pods[1]["metadata"]["name"]
    await tell("wait 3540, look, it silent, wait 120, look, it left-alone, phase Running, causes -", world)
    assert f"1 of 2 pods have exited 0 ({name})" in world.message("Progressing")
    await tell("events PartiallyFinished 1, rests, restart, rests", world)


async def test_pods_that_were_left_alone_and_all_run_again_are_not_left_alone_any_more() -> None:
    slices = {"tpu": {"accelerator": "v5p", "topology": "2x2x1", "slices": 2}}
    world = await tell("finish, wait 3600, look, it left-alone", placement=slices)
    job = world.pods[1]["metadata"]["ownerReferences"][0]
    await world.cluster.delete(BATCH_JOBS, "default", job["name"], uid=job["uid"])
    await tell("run 4, condition Running True/AllPodsRun, it silent, rests", world)


async def test_a_time_without_reports_counts_as_no_long_step() -> None:
    world = await tell(f"{FIRST}, step 2000 {5 * HOUR_S}, step 2001, step 2002, it advances")
    assert world.status.progress is not None
    assert world.status.progress.longest_step_millis == 10_000
    await tell("stand 2002 1800, it stands", world)


async def test_a_share_that_the_trainer_reports_by_itself_arms_no_hang() -> None:
    world = await run_job()
    status = TrainerStatus(ordinal=(0, 0), percent=30, remaining_s=280, metrics={"current_step": "120"})
    for _ in range(2):
        world.reports.set_trainer_status(world.job.metadata.uid, status)
        await world.reconcile()
        world.now += 10 * HOUR_S
    assert world.status.progress is not None
    assert world.status.progress.percent == 30
    assert world.status.progress.longest_step_millis is None
    check(world, "silent")
