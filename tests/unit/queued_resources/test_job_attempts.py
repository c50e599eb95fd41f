"""Attempts of jobs whose machines go and come back while a pod's end is still being dealt with."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fake_cluster.job_machines import change, machines, running
from fake_cluster.stories import play, stories
from fake_cluster.world import World

SURVIVOR = "silence, end 1, run 3, costs ApplicationError=1/1"
CORRECTED = "causes SpotPreemption, costs, events CauseCorrected 1, both-told"
SPOT: dict[str, Any] = {"spot": {}}
GONE: dict[str, Any] = {"active": False, "joined": False, "state": "Suspended"}


async def tell(world: World, story: str) -> World:
    return await play(world, story, **STEPS)


async def look(world: World) -> None:
    await world.reconcile()
    world.now += 5


def see(**resource: Any) -> Callable[[World], Awaitable[object]]:
    """Let the operator see machines that are so, before the cluster does anything about it."""

    def step(world: World) -> Awaitable[object]:
        world.cluster.put("queuedresources", machines(tier=SPOT, **resource))
        return world.reconcile()

    return step


def end(world: World, code: str, reason: str = "") -> None:
    """Let the first pod that runs end."""
    pod = next(pod for pod in world.pods if pod["status"]["phase"] == "Running")
    world.controllers.end_pod(pod, int(code), reason=reason)


def cluster_acts(world: World) -> None:
    world.controllers.sync()
    world.now += 5


def be_away(world: World) -> None:
    """Let the operator be away until the machines are back."""
    world.stop_operator()
    cluster_acts(world)
    world.cluster.put("queuedresources", machines(tier=SPOT))
    world.restart_operator()


def restart_without_pods(world: World) -> None:
    """Let JobSet have deleted the pods for a restart, and made no new one."""
    jobset = world.jobset
    assert jobset is not None
    for plural in ("pods", "jobs"):
        for raw in world.cluster.list_objects(plural):
            world.cluster.remove(plural, raw["metadata"]["namespace"], raw["metadata"]["name"])
    world.cluster.put("jobsets", jobset | {"status": jobset.get("status", {}) | {"restarts": 1}})


def check_words(world: World) -> None:
    first = world.status.attempts[0].message or ""
    assert "exited with code 1" in first
    assert "QueuedResource pod-a are gone" in first


STEPS: dict[str, Callable[..., object]] = {
    "look": look,
    "lose": see(**GONE),
    "back": see(),
    "go": lambda world: change(world, tier=SPOT, **GONE),
    "return": lambda world: change(world, tier=SPOT),
    "act": cluster_acts,
    "end": end,
    "notice": lambda world: world.controllers.notice_failures(),
    "silence": lambda world: world.controllers.gone.add(world.pods[1]["spec"]["nodeName"]),
    "stick": lambda world: world.controllers.stuck.add(world.pods[1]["spec"]["nodeName"]),
    "be-away": be_away,
    "no-pods": restart_without_pods,
    "both-told": check_words,
}


@stories(
    {
        "an end that its job hasn't seen": "end 1, look, lose, act, back",
        "an end that its job acts on afterwards": (
            "end 1, stick, notice, look, lose, act, back, look, act, look"
        ),
        "an end that a new operator sees with it": "end 1, lose, restart, run 3, back",
        "an operator that was away": "end 1, look, lose, be-away",
        "a restart without pods, seen before": (
            "disrupt 0 TerminationByKubelet, end 75, look, no-pods, look, lose, act, run 3, back"
        ),
        "new pods on machines that are left": "end 1, look, silence, act, look, go, back",
        "new pods that fail on those that are left": (
            "end 1, look, silence, act, look, end 1, lose, run 3, back"
        ),
        "a survivor that failed before a new operator saw it": (
            f"{SURVIVOR}, restart, go, {CORRECTED}, back"
        ),
    }
)
async def test_one_loss_of_machines_costs_one_restart_and_pods_that_run_are_an_attempt(story: str) -> None:
    await settle(await tell(await running(tier=SPOT), story))


async def settle(world: World) -> None:
    world.controllers.stuck.clear()
    world.controllers.gone.clear()
    await play(world, "run, phase Running, causes SpotPreemption -")
    assert all(pod["status"]["phase"] == "Running" for pod in world.pods)
    counts = [(e.cause, e.count, e.counted_towards_limit) for e in world.status.restarts.by_cause if e.count]
    assert counts == [("SpotPreemption", 1, 0)]
    await play(world, "rests")


@pytest.mark.parametrize("restart", ["", "restart, "])
async def test_a_jobset_that_survivors_have_failed_does_not_end_the_job(restart: str) -> None:
    world = await running(tier=SPOT, restarts={"maxFailures": 0})
    await tell(world, ", ".join(["end 1", *["run 3"] * 7, "phase Restarting"]))
    assert world.jobset is not None
    assert world.jobset["status"]["conditions"][-1]["type"] == "Failed"
    await settle(await tell(world, f"{restart}go, phase Suspended, return"))


async def test_a_last_failure_ends_the_job_at_once_if_no_loss_can_explain_it_and_else_two_minutes_later() -> (
    None
):
    world = await running(tier=SPOT, restarts={"maxFailures": 0})
    await tell(world, "end 137 OOMKilled, run 3, phase Failed")
    world = await tell(await running(tier=SPOT, restarts={"maxFailures": 0}), "end 1, run 3")
    ended = world.status.attempts[-1].end
    assert ended is not None
    world.now = ended + 119
    await play(world, "look, phase Restarting, wait 2, run 1, phase Failed")
