"""Test that a job comes to rest with an attempt for its pods, whatever happens to its machines and when."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import scaled

from fake_cluster.job_machines import machines, world_of
from fake_cluster.kubelets import termination_message
from fake_cluster.world import World
from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase

SPOT: dict[str, Any] = {"spot": {}}
NODES = ("n1", "n2", "n3", "n4")


def _end(world: World, index: int, code: int, message: str = "") -> None:
    pods = [pod for pod in world.pods if pod["status"]["phase"] == "Running"]
    if pods:
        world.controllers.end_pod(pods[index % len(pods)], code, message=message)


def _saved(world: World, index: int) -> None:
    _end(world, index, ExitCode.SAVED, termination_message(ExitCode.SAVED, notice="sigterm", step=1))


def _lost(world: World, state: str) -> None:
    """Let the machines go: their kubelets say nothing any more, and no pod starts on them."""
    world.controllers.gone.update(NODES)
    gone = machines(tier=SPOT, active=False, joined=False, state=state)
    world.cluster.put("queuedresources", gone)


def _back(world: World, uid: str) -> None:
    world.controllers.gone.clear()
    world.controllers.stuck.clear()
    world.cluster.put("queuedresources", machines(tier=SPOT, uid=uid))


def _away(world: World, _index: int) -> None:
    world.stop_operator()
    world.controllers.sync()
    world.now += 5
    world.restart_operator()


HAPPENINGS: dict[str, Callable[[World, int], None]] = {
    "a pod fails": lambda world, index: _end(world, index, 1),
    "a pod is killed": lambda world, index: _end(world, index, 143),
    "a pod saves and stops": _saved,
    "jobs notice failures": lambda world, _index: world.controllers.notice_failures(),
    "the machines are suspended": lambda world, _index: _lost(world, "Suspended"),
    "the machines are preempted": lambda world, _index: _lost(world, "Active"),
    "a kubelet is silent": lambda world, index: world.controllers.stuck.add(NODES[index % 4]),
    "the machines are back": lambda world, _index: _back(world, "uid-a"),
    "other machines are there": lambda world, index: _back(world, f"uid-{index}"),
    "the job is suspended": lambda world, _index: world.edit(suspend=True),
    "the job is resumed": lambda world, _index: world.edit(suspend=False),
    "the operator is restarted": lambda world, _index: world.restart_operator(),
    "the operator is away": _away,
    "two minutes pass": lambda world, _index: setattr(world, "now", world.now + 121),
}

happenings = st.lists(
    st.tuples(st.sampled_from(sorted(HAPPENINGS)), st.integers(0, 7), st.integers(0, 2), st.integers(0, 2)),
    max_size=12,
)
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]


async def play(world: World, story: list[tuple[str, int, int, int]]) -> None:
    """Play the events, with so many reconciles and so many rounds of the controllers after each."""
    for name, index, reconciles, rounds in story:
        HAPPENINGS[name](world, index)
        for _ in range(reconciles):
            await world.reconcile()
        for _ in range(rounds):
            world.controllers.sync()
            world.now += 2
    _back(world, "uid-a")
    world.edit(suspend=False)
    for _ in range(12):
        await world.run_until_settled(rounds=4)
        world.now += 60
    await world.run_until_settled(rounds=2)


def check(world: World) -> None:
    status = world.status
    attempts = status.attempts
    pods = [pod for pod in world.pods if pod["status"]["phase"] == "Running"]
    assert status.phase in {Phase.RUNNING, Phase.FAILED}
    assert bool(pods) is (status.phase is Phase.RUNNING)
    assert bool(pods) is (attempts[-1].end is None), "pods run, so that an attempt is open"
    assert all(attempt.end is not None for attempt in attempts[:-1])
    assert [attempt.number for attempt in attempts] == list(
        range(attempts[0].number, attempts[-1].number + 1)
    )
    assert status.restarts.total == attempts[-1].number - 1, "each attempt but the first is one restart"
    failed = next((c for c in status.conditions if c.type == "Failed"), None)
    if failed is not None and failed.status is ConditionStatus.TRUE:
        assert failed.reason == "MaxFailuresReached"


@pytest.mark.timeout(600)
@settings(max_examples=scaled(60), deadline=None, suppress_health_check=slow)
@given(story=happenings)
def test_while_pods_run_an_attempt_is_open(story: list[tuple[str, int, int, int]]) -> None:
    async def run() -> None:
        world = world_of(machines(tier=SPOT))
        await world.run_until_settled(rounds=4)
        await play(world, story)
        check(world)
        assert await world.record_writes(rounds=3) == []

    asyncio.run(run())


def test_the_happenings_have_an_effect() -> None:
    """A run without events would prove nothing."""

    async def run() -> None:
        world = world_of(machines(tier=SPOT))
        await world.run_until_settled(rounds=4)
        await play(world, [("a pod fails", 0, 1, 0), ("the machines are suspended", 0, 1, 2)])
        assert [attempt.cause for attempt in world.status.attempts] == ["SpotPreemption", None]

    asyncio.run(run())
