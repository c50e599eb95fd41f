"""Test condition Progressing: a training that makes no steps is noticed and explained, and no pod is ended."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.kubelets import termination_message, training_report
from fake_cluster.stories import play, run_job, stories
from fake_cluster.world import World
from stepkeeper.contract import ExitCode, Hang, ReportPhase
from stepkeeper_operator.cache.reports import TrainerStatus
from stepkeeper_operator.cluster.resources import BATCH_JOBS

FIELDS: Final[dict[str, dict[str, Any]]] = {"done": {"phase": ReportPhase.DONE}}
REASONS: Final = {
    "silent": "Unknown/NoReports",
    "unknown": "Unknown/NoStepYet",
    "not-running": "Unknown/NotRunning",
    "advances": "True/StepsAdvance",
    "all-made": "True/AllStepsMade",
    "stands": "False/Stalled",
    "left-alone": "False/PartiallyFinished",
}
HANG: Final = Hang(kind="Stopped", since_unix_s=1, text="rank 1 is stopped", stacks="rank 1:")
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


async def hang(world: World, step: str) -> None:
    await report(world, None if step == "none" else int(step), hang=HANG)


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
        unread=lambda world, step: world.receive_report(replace(training_report(8, int(step)), commits=())),
        commit=report_commit,
        stand=stand,
        hang=hang,
        finish=finish_one,
        it=check,
    )


@stories(
    {
        "no step, and no hang": f"{FIRST}, stand 3 3540, it advances, stand 3 60, it unknown, step 4, it advances",
        "no step yet": "stand none 60, it unknown, stand none 3600, it unknown",
        "one step": "step 1, it advances",
        "an end": f"{FIRST}, stand 3 3600 0 done, it all-made",
        "all steps made": "step 9998, step 9999, step 10000, stand 10000 7200, it all-made",
        "commits": f"{FIRST}, stand 3 3000, commit 9 3, stand 3 3000, commit 10 3, stand 3 3000, it advances",
        "silence": f"{FIRST}, wait 18000, look, condition Reporting False/NoReports, it silent, step 4, it advances",
        "a hang": f"{FIRST}, hang 3, it stands, step 4, it advances",
        "a hang before the first step": "hang none, it stands",
        "a hang that goes on": f"{FIRST}, hang 3, hang 3, hang 3, it stands, events Stalled 1, rests",
        "silence after a hang": f"{FIRST}, hang 3, wait 18000, look, it stands",
        "silence after the end of a hang": f"{FIRST}, hang 3, it stands, unread 4, wait 18000, look, it silent",
        "steps of pods after one is done": (
            f"{FIRST}, finish, step 4 3540, stand 4 120, it advances, stand 4 3600, it left-alone, step 5, it advances"
        ),
        "an operator that starts in a hang": (
            f"{FIRST}, hang 3, restart, rests, it stands, hang 3, it stands, events Stalled 1, step 4, it advances"
        ),
        "steps of pods after one is done, and an operator that starts later": (
            f"{FIRST}, finish, step 4 3540, wait 3500, restart, look, it advances, step 5 60, it advances"
        ),
        "the next attempt after a preemption": f"{FIRST}, hang 3, preempt, run 6, it silent, step 1, it advances",
        "the next attempt after a suspension": (
            f"{FIRST}, hang 3, it stands, suspend, run, it not-running, resume, run 6, it silent, step 1, it advances"
        ),
        # Its Jobs have not counted them yet.
        "the end after one was done": (
            f"{FIRST}, finish 0, stand 3 3600 1, it left-alone, fail 0 1, wait 1, look, phase Running, it advances"
        ),
    },
)
async def test_a_training_advances_stands_or_is_not_known_to(story: str) -> None:
    world = await tell(story)
    assert "hang" in story or "Stalled" not in world.events


@pytest.mark.parametrize("before", ["", f"{FIRST}, "])
async def test_pods_that_go_on_for_an_hour_after_another_is_done_are_seen_and_left_alone(before: str) -> None:
    world = await tell(f"{before}finish")
    name = world.pods[1]["metadata"]["name"]
    await tell("wait 3540, look, it silent, wait 120, look, it left-alone, phase Running, causes -", world)
    assert f"1 of 2 pods have exited 0 ({name})" in world.message("Progressing")
    assert "kubectl -n default annotate --overwrite ctj lm" in world.message("Progressing")
    await tell("events PartiallyFinished 1, rests, restart, rests", world)
    await tell("ask 1, run, phase Running, pods 2, causes Requested -", world)


async def test_pods_that_were_left_alone_and_all_run_again_are_not_left_alone_any_more() -> None:
    slices = {"tpu": {"accelerator": "v5p", "topology": "2x2x1", "slices": 2}}
    world = await tell("finish, wait 3600, look, it left-alone", placement=slices)
    job = world.pods[1]["metadata"]["ownerReferences"][0]
    await world.cluster.delete(BATCH_JOBS, "default", job["name"], uid=job["uid"])
    await tell("run 4, condition Running True/AllPodsRun, it silent, rests", world)


async def test_a_share_that_the_trainer_reports_by_itself_is_no_step() -> None:
    world = await run_job()
    status = TrainerStatus(ordinal=(0, 0), percent=30, remaining_s=280, metrics={"current_step": "120"})
    for _ in range(2):
        world.reports.set_trainer_status(world.job.metadata.uid, status)
        await world.reconcile()
        world.now += 36_000
    assert world.status.progress is not None
    assert (world.status.progress.percent, world.status.progress.eta) == (30, "5m")
    assert world.status.progress.step is None
    check(world, "silent")
