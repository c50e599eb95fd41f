"""Test what follows a hang that the pods report: it is named, its stacks are kept, and the job restarts if it may."""

from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.kubelets import training_report
from fake_cluster.stories import play, run_job, same, stories
from fake_cluster.world import World
from stepkeeper.contract import Hang, HangLimits, Settings
from stepkeeper_operator.cluster.resources import CONFIG_MAPS
from stepkeeper_operator.errors import ApiError

HANG: Final = Hang(
    kind="Stopped",
    since_unix_s=1_800_000_000,
    ranks=(1,),
    text="rank 1 is stopped",
    stacks="rank 1:\n  File …\n",
)
RESTART: Final[dict[str, Any]] = {"action": "Restart", "maxRestarts": 2}


async def hang(world: World, since: str = "0", after_s: str = "10") -> None:
    world.now += float(after_s)
    found = replace(HANG, since_unix_s=HANG.since_unix_s + int(since))
    world.receive_report(replace(training_report(8, 120), hang=found, commits=()))
    await world.reconcile()


async def commit(world: World, number: str) -> None:
    world.now += 10
    world.receive_report(training_report(int(number), 100 + int(number)))
    await world.reconcile()


def check_ended(world: World, count: str) -> None:
    """Check how often pods were ended for a hang: both were marked before the first was deleted."""
    writes = [
        f"{write.verb} {write.plural}"
        for write in world.cluster.writes
        if write.plural in {"pods", "pods/status"}
    ]
    same(len(writes), 4 * int(count))
    assert writes == ["patch pods", "patch pods", "delete pods", "delete pods"] * int(count), writes


def list_stacks(world: World) -> list[str]:
    maps = world.cluster.list_objects("configmaps")
    return [raw["metadata"]["name"] for raw in maps if "stacks" in raw["data"]]


async def tell(story: str, world: World | None = None, **spec: Any) -> World:
    """Play a story of a job with two pods, whose hangs have these settings."""
    return await play(
        world or await run_job(hang=RESTART | spec), story, hang=hang, commit=commit, ended=check_ended
    )


async def test_a_hang_restarts_the_job_without_a_charge_and_its_stacks_stay() -> None:
    world = await tell("hang, condition Progressing False/Stalled, ended 1")
    message = world.message("Progressing")
    assert message.startswith(
        "Stopped, nothing has moved since 2027-01-15T08:00:00Z: rank 1 is stopped. The attempt is"
    )
    assert {pod["metadata"]["deletionGracePeriodSeconds"] for pod in world.pods} == {1}
    world.controllers.kubelets.stop_code = 137
    await tell("run 4, phase Running, causes Hang -, costs Hang=1/1, events Stalled 1, rests", world)
    first, second = world.status.attempts
    name = world.pods[0]["metadata"]["name"].rpartition("-")[0]
    assert (first.message or "").startswith(f"pod {name}")
    assert (first.message or "").endswith(" made no progress: rank 1 is stopped")
    assert second.stacks is None
    raw = await world.cluster.get(CONFIG_MAPS, "default", first.stacks or "")
    assert raw is not None
    assert raw["data"] == {
        "attempt": "1",
        "since": "2027-01-15T08:00:00Z",
        "kind": "Stopped",
        "text": "rank 1 is stopped",
        "stacks": HANG.stacks,
    }
    assert raw["metadata"]["ownerReferences"][0]["uid"] == world.job.metadata.uid
    assert f"get configmap {first.stacks} -o jsonpath" in message


@stories(
    {
        "once": "hang, ended 1, hang, ended 1, restart, hang, ended 1, run 4, causes Hang -, rests",
        "as often as allowed": "hang, run 4, hang, run 4, hang, run 4, ended 2, causes Hang Hang -, rests",
        "more often after commits": "hang, run 4, hang, run 4, commit 9, hang, run 4, ended 3, costs Hang=3/1, rests",
        "not in a job that is suspended": "suspend, hang, ended 0",
        "not by a report that is old": "hang 0 0, ended 1, run 4, commit 9, wait 500, look, ended 1",
        "not after it has moved": "commit 9, ended 0, condition Progressing True/StepsAdvance",
        "not in an attempt that ends already": "fail 1 0, hang, ended 0, run 4, causes ApplicationError -",
    }
)
async def test_pods_are_ended_for_a_hang(story: str) -> None:
    world = await run_job(hang=RESTART)
    world.controllers.kubelets.stop_code = 137
    await tell(story, world)


async def test_programs_that_exit_0_when_they_are_ended_for_a_hang_are_not_done() -> None:
    world = await run_job(hang=RESTART)
    world.controllers.kubelets.stop_code = 0
    await tell("hang, run 4, phase Running, causes Hang -, costs Hang=1/1, rests", world)


async def test_a_hang_is_only_reported_unless_the_job_or_the_chart_wants_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = "condition Progressing False/Stalled, events Stalled 1, rests"
    world = await tell(f"hang, hang, ended 0, {seen}", action="Report")
    assert "No pod is ended: spec.hang.action is Report. To restart from" in world.message("Progressing")
    assert list_stacks(world) == [world.status.attempts[-1].stacks]
    await tell("hang, ended 0", await run_job())
    monkeypatch.setenv("STEPKEEPER_OPERATOR_HANG_ACTION", "Restart")
    await tell("hang, ended 1", await run_job())
    await tell("hang, ended 0", action="Report")


async def test_the_last_hangs_are_only_reported() -> None:
    world = await tell("hang, condition Progressing False/Stalled, ended 0", maxRestarts=0)
    assert "spec.hang.maxRestarts allows 0 restarts after hangs without a new commit" in world.message(
        "Progressing"
    )


async def test_the_stacks_of_the_last_three_attempts_that_hung_are_kept() -> None:
    world = await run_job(hang=RESTART | {"maxRestarts": 9})
    world.controllers.kubelets.stop_code = 137
    named: list[list[bool]] = []
    for number in range(5):
        await tell(f"hang {number}, run 4", world)
        named.append([attempt.stacks is not None for attempt in world.status.attempts])
        assert len(set(list_stacks(world))) == min(3, number + 1)
    assert named[-1] == [False, True, True, True, False], "of the five attempts that the status shows"
    kept = [attempt.stacks for attempt in world.status.attempts if attempt.stacks]
    assert sorted(kept) == list_stacks(world)
    for attempt in world.status.attempts[1:4]:
        raw = await world.cluster.get(CONFIG_MAPS, "default", attempt.stacks or "")
        assert raw is not None
        assert raw["data"]["attempt"] == str(attempt.number)


async def test_stacks_that_can_not_be_written_are_written_later() -> None:
    world = await run_job(hang={"action": "Report"})
    world.cluster.refusals["apply", "configmaps"] = ApiError(500, "no")
    with suppress(ApiError):
        await hang(world)
    assert list_stacks(world) == []
    world.cluster.refusals.clear()
    await tell("hang, rests", world)
    assert len(list_stacks(world)) == 1


async def test_pods_get_the_limits_of_their_job_or_the_charts() -> None:
    async def read(**spec: Any) -> HangLimits | None:
        world = await run_job(**spec)
        raw = await world.cluster.get(CONFIG_MAPS, "default", "lm-stepkeeper")
        assert raw is not None
        return Settings.from_json(raw["data"]["settings.json"]).hang

    assert await read() == HangLimits(startup_s=3600)
    assert await read(hang={"afterSeconds": 60, "startupSeconds": 7}) == HangLimits(startup_s=7, after_s=60)
