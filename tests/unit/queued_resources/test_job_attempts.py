"""Attempts of jobs whose machines go and come back while a pod's end is still being dealt with."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fake_cluster.job_machines import change, machines, running, world_of
from fake_cluster.kubelets import training_report
from fake_cluster.world import World
from stepkeeper.contract import CommitPoint
from stepkeeper_operator.api.v1alpha1.conditions import Phase

NODES = ("n1", "n2", "n3", "n4")
SPOT: dict[str, Any] = {"spot": {}}
GONE: dict[str, Any] = {"tier": SPOT, "active": False, "joined": False, "state": "Suspended"}
Step = Callable[[World], Awaitable[object] | object]


async def play(world: World, story: str) -> None:
    """Let the steps of a story happen, which are named in STEPS."""
    for step in story.split(", "):
        done = STEPS[step](world)
        if isinstance(done, Awaitable):
            await done


async def look(world: World) -> None:
    await world.reconcile()
    world.now += 5


def see(**resource: Any) -> Step:
    """Let the operator see machines that are so, before the cluster does anything about it."""

    def step(world: World) -> Awaitable[object]:
        world.cluster.put("queuedresources", machines(tier=SPOT, **resource))
        return world.reconcile()

    return step


def end(code: int, **more: Any) -> Step:
    """Let the first pod that runs end."""

    def step(world: World) -> None:
        pod = next(pod for pod in world.pods if pod["status"]["phase"] == "Running")
        world.controllers.end_pod(pod, code, **more)

    return step


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


def hang(world: World) -> None:
    condition = {"type": "stepkeeper.dev/Hang", "status": "True", "reason": "NoProgress"}
    pod = world.pods[0]
    world.cluster.put("pods", pod | {"status": pod["status"] | {"conditions": [condition]}})


STEPS: dict[str, Step] = {
    "look": look,
    "lose": see(**{key: GONE[key] for key in GONE if key != "tier"}),
    "back": see(),
    "others": see(uid="uid-b"),
    "stop": lambda world: change(world, **GONE),
    "act": cluster_acts,
    "run": lambda world: world.run_until_settled(rounds=3),
    "fail": end(1),
    "save": end(75),
    "kill": end(143),
    "out of memory": end(137, reason="OOMKilled"),
    "notice": lambda world: world.controllers.notice_failures(),
    "wait": lambda world: setattr(world, "now", world.now + 130),
    "all silent": lambda world: world.controllers.gone.update(NODES),
    "second silent": lambda world: world.controllers.gone.add(world.pods[1]["spec"]["nodeName"]),
    "second stuck": lambda world: world.controllers.stuck.add(world.pods[1]["spec"]["nodeName"]),
    "restart": lambda world: world.restart_operator(),
    "away": be_away,
    "preempt": lambda world: world.preempt(),
    "disrupt": lambda world: world.controllers.disrupt(world.pods[0], "TerminationByKubelet"),
    "no pods": restart_without_pods,
    "hang": hang,
}
ONE_LOSS = {
    "an end that its job hasn't seen": "fail, look, lose, act, back",
    "a save that its job hasn't seen": "save, look, lose, act, others",
    "an end that its job acts on meanwhile": "kill, notice, look, lose, run, others",
    "an end that its job acts on afterwards": (
        "fail, second stuck, notice, look, lose, act, back, look, act, look"
    ),
    "machines that are back before a stop": "preempt, look, lose, back",
    "an end that is seen together with it": "fail, lose, run, back",
    "an end that a new operator sees with it": "fail, lose, restart, run, back",
    "an operator that was away": "fail, look, lose, away",
    "a restart without pods, seen before": "disrupt, save, look, no pods, look, lose, act, run, back",
    "a restart without pods, seen with it": "disrupt, save, look, no pods, lose, act, run, back",
    "new pods on machines that are gone": "fail, look, all silent, act, look, stop, back",
    "new pods on machines that are left": "fail, look, second silent, act, look, stop, back",
    "new pods that fail on those that are left": "fail, look, second silent, act, look, fail, lose, run, back",
    "new pods on machines that seem gone": "all silent, fail, run, lose, back",
}


@pytest.mark.parametrize("story", ONE_LOSS.values(), ids=ONE_LOSS)
async def test_one_loss_of_machines_costs_one_restart_and_pods_that_run_are_an_attempt(story: str) -> None:
    world = await running(tier=SPOT)
    await play(world, story)
    await settle(world)


async def settle(world: World) -> None:
    world.controllers.stuck.clear()
    world.controllers.gone.clear()
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert all(pod["status"]["phase"] == "Running" for pod in world.pods)
    assert world.causes == ["SpotPreemption", None]
    counts = [(e.cause, e.count, e.counted_towards_limit) for e in world.status.restarts.by_cause if e.count]
    assert counts == [("SpotPreemption", 1, 0)]
    assert await world.record_writes(rounds=3) == []


OWN_FAILURES: dict[str, tuple[str, list[str | None]]] = {
    "it was over its memory limit": ("second silent, out of memory, run, stop", ["ApplicationError"]),
    "it failed long before": ("fail, run, wait, stop", ["ApplicationError", "SpotPreemption"]),
    "it failed long before, and a pod still stops": (
        "second stuck, fail, run, wait, lose",
        ["ApplicationError"],
    ),
    "it hung, and the next pods never ran": (
        "hang, kill, look, second silent, act, look, lose, fail, look, stop",
        ["Hang"],
    ),
}


@pytest.mark.parametrize(("story", "causes"), OWN_FAILURES.values(), ids=OWN_FAILURES)
async def test_a_loss_of_machines_explains_no_end_if(story: str, causes: list[str | None]) -> None:
    world = await running(tier=SPOT)
    await play(world, story)
    assert world.causes == causes
    assert "CauseCorrected" not in world.events


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_survivor_that_failed_before_the_loss_was_seen_costs_no_failure(*, restarted: bool) -> None:
    world = await running(tier=SPOT)
    await play(world, "second silent, fail, run")
    assert [(e.cause, e.counted_towards_limit) for e in world.status.restarts.by_cause] == [
        ("ApplicationError", 1)
    ]
    if restarted:
        world.restart_operator()
    await change(world, **GONE)
    assert world.causes == ["SpotPreemption"]
    assert world.status.restarts.total == 0
    assert "CauseCorrected" in world.events
    first = world.status.attempts[0].message or ""
    assert "exited with code 1" in first
    assert "QueuedResource pod-a are gone" in first
    await play(world, "back")
    await settle(world)


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_jobset_that_survivors_have_failed_does_not_end_the_job(*, restarted: bool) -> None:
    world = await running(tier=SPOT, restarts={"maxFailures": 0})
    await play(world, ", ".join(["fail", *["run"] * 7]))
    assert world.jobset is not None
    assert world.jobset["status"]["conditions"][-1]["type"] == "Failed"
    assert world.phase() is Phase.RESTARTING
    if restarted:
        world.restart_operator()
    await change(world, **GONE)
    assert world.phase() is Phase.SUSPENDED
    await change(world, tier=SPOT)
    await settle(world)


async def test_a_last_failure_ends_the_job_at_once_if_no_loss_can_explain_it_and_else_two_minutes_later() -> (
    None
):
    world = await running(tier=SPOT, restarts={"maxFailures": 0})
    await play(world, "out of memory, run")
    assert world.phase() is Phase.FAILED
    world = await running(tier=SPOT, restarts={"maxFailures": 0})
    await play(world, "fail, run")
    ended = world.status.attempts[-1].end
    assert ended is not None
    world.now = ended + 119
    await world.run_until_settled(rounds=0)
    assert world.phase() is Phase.RESTARTING
    world.now = ended + 121
    await world.run_until_settled(rounds=1)
    assert world.phase() is Phase.FAILED


@pytest.mark.parametrize("restarts", [0, 1])
async def test_machines_that_go_before_the_first_pod_has_run_cost_nothing(restarts: int) -> None:
    world = world_of(machines(tier=SPOT))
    await play(world, "all silent, run")
    assert world.causes == [None]
    await change(world, **GONE)
    assert world.causes == []
    jobset = world.jobset
    assert jobset is not None
    world.cluster.put("jobsets", jobset | {"status": jobset["status"] | {"restarts": restarts}})
    await world.reconcile()
    world.controllers.gone.clear()
    await change(world, tier=SPOT)
    assert world.causes == [None]
    assert world.phase() is Phase.RUNNING
    assert world.status.restarts.total == 0


async def test_a_failure_that_a_suspension_by_the_user_met_and_a_later_loss_are_two_restarts() -> None:
    world = await running(tier=SPOT)
    await play(world, "fail, look")
    world.edit(suspend=True)
    await world.run_until_settled(rounds=3)
    world.edit(suspend=False)
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]
    await change(world, **GONE)
    await change(world, tier=SPOT)
    assert world.causes == ["ApplicationError", "SpotPreemption", None]
    assert world.status.restarts.total == 2


async def test_a_report_from_before_a_suspension_says_nothing_of_the_attempt_after_it() -> None:
    world = await running(tier=SPOT)
    restored = CommitPoint(sequence=3, step=40)
    world.receive_report(training_report(sequence=5, step=100, restored=restored, in_flight_step=110))
    await look(world)
    await change(world, **GONE)
    await change(world, tier=SPOT)
    first, second = world.status.attempts
    assert (first.from_step, first.to_step) == (40, 100)
    assert (second.from_step, second.to_step) == (None, None)
    checkpoint = world.status.checkpoint
    assert checkpoint is not None
    assert (checkpoint.restored, checkpoint.in_flight_step) == (None, None)
