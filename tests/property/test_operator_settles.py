"""Test that the operator comes to rest after any events in any order, and never runs what it must not run."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from thoroughness import scaled

from fake_cluster.world import World
from stepkeeper.contract import ExitCode, Head, Report, ReportedCommit, ReportPhase, Termination
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase


def _end(world: World, index: int, code: int, message: str = "") -> None:
    pods = [pod for pod in world.pods if pod["status"]["phase"] == "Running"]
    if pods:
        world.controllers.end_pod(pods[index % len(pods)], code, message=message)


def _disrupt(world: World, index: int, reason: str) -> None:
    pods = [pod for pod in world.pods if pod["status"]["phase"] == "Running"]
    if pods:
        pod = pods[index % len(pods)]
        world.controllers.disrupt(pod, reason)
        world.controllers.end_pod(pod, int(ExitCode.SAVED))


def _commit(world: World, index: int) -> None:
    latest = world.status.checkpoint.latest if world.status.checkpoint is not None else None
    sequence = 1 + index + (0 if latest is None else latest.sequence)
    uri = f"gs://bucket/runs/lm/{sequence}"
    commit = ReportedCommit(
        sequence=sequence, step=sequence, uri=uri, size_bytes=1, duration_millis=1, time_unix_s=1
    )
    head = Head(sequence=sequence, step=sequence, uri=uri, size_bytes=1)
    report = Report(
        phase=ReportPhase.TRAINING, root="r", tail=sequence, head=head, step=sequence, commits=(commit,)
    )
    world.receive_report(report)


def _saved(world: World, index: int) -> None:
    _end(world, index, 75, Termination(code=75, notice="sigterm", step=1).to_json().decode())


def _away(world: World, _index: int) -> None:
    world.stop_operator()
    world.controllers.sync()
    world.restart_operator()


HAPPENINGS: dict[str, Callable[[World, int], None]] = {
    "a pod fails": lambda world, index: _end(world, index, 1),
    "a pod saves and stops": _saved,
    "a pod stops without a word": lambda world, index: _end(world, index, 75),
    "a pod loses its peers": lambda world, index: _end(world, index, 78),
    "a pod is fenced": lambda world, index: _end(world, index, 77),
    "a pod is done": lambda world, index: _end(world, index, 0),
    "a pod is evicted": lambda world, index: _disrupt(world, index, "EvictionByEvictionAPI"),
    "a machine is taken back": lambda world, index: _disrupt(world, index, "TerminationByKubelet"),
    "a node is lost": lambda world, index: world.lose_node(f"n{1 + index % 4}"),
    "a commit": _commit,
    "the job is suspended": lambda world, _index: world.edit(suspend=True),
    "the job is resumed": lambda world, _index: world.edit(suspend=False),
    "the image is changed": lambda world, index: world.edit(
        template={"spec": {"containers": [{"name": "trainer", "image": f"trainer:{index}"}]}}
    ),
    "the jobset is deleted": lambda world, _index: (
        world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
        if world.jobset is not None
        else None
    ),
    "the operator is restarted": lambda world, _index: world.restart_operator(),
    "the operator is away": _away,
    "a minute passes": lambda world, _index: setattr(world, "now", world.now + 60),
}

happenings = st.lists(
    st.tuples(st.sampled_from(sorted(HAPPENINGS)), st.integers(0, 7), st.integers(0, 3)), max_size=14
)
slow = [HealthCheck.too_slow, HealthCheck.data_too_large]


async def play(world: World, story: list[tuple[str, int, int]]) -> None:
    """Play the events, with so many reconciles and rounds of the controllers after each."""
    for name, index, rounds in story:
        HAPPENINGS[name](world, index)
        for _ in range(rounds):
            await world.reconcile()
            world.controllers.sync()
            world.now += 1
        check_invariants(world)


async def come_to_rest(world: World) -> None:
    """Let back-offs, grace periods and the time of a guess pass."""
    for _ in range(12):
        await world.run_until_settled(rounds=4)
        world.now += 60


def check_invariants(world: World) -> None:
    status = world.status
    numbers = [attempt.number for attempt in status.attempts]
    assert numbers == sorted(set(numbers)), "attempts are numbered upwards"
    assert all(attempt.end is not None for attempt in status.attempts[:-1]), "only the last attempt can run"
    assert sum(entry.count for entry in status.restarts.by_cause) == status.restarts.total
    for attempt in status.attempts:
        assert attempt.end is None or attempt.end >= attempt.start
    true = {c.type for c in status.conditions if c.status is ConditionStatus.TRUE}
    assert not {"Complete", "Failed"} <= true
    assert not {"Running", "Failed"} <= true


def may_run_on(world: World, pod: dict[str, Any]) -> bool:
    """Return False for a deleted pod that only waits for a silent node to end it."""
    told = pod["metadata"].get("deletionTimestamp") and pod["spec"]["nodeName"] in world.controllers.stuck
    return pod["status"]["phase"] == "Running" and not told


@settings(max_examples=scaled(80), deadline=None, suppress_health_check=slow)
@given(story=happenings)
@example(story=[("a node is lost", 0, 1), ("a pod is fenced", 1, 0)])
def test_the_operator_comes_to_rest_and_then_writes_nothing(story: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        world = World()
        await play(world, story)
        await come_to_rest(world)
        check_invariants(world)
        assert await world.record_writes(rounds=3) == []
        if world.status.phase is Phase.FAILED:
            assert not [pod for pod in world.pods if may_run_on(world, pod)], "nothing runs after the end"

    asyncio.run(run())


@settings(max_examples=scaled(40), deadline=None, suppress_health_check=slow)
@given(story=happenings)
def test_a_restarted_operator_decides_as_the_old_one_would_have(story: list[tuple[str, int, int]]) -> None:
    async def run() -> None:
        world = World()
        await play(world, story)
        await come_to_rest(world)
        world.restart_operator()
        assert await world.record_writes(rounds=2) == []

    asyncio.run(run())


@settings(max_examples=scaled(40), deadline=None, suppress_health_check=slow)
@given(max_failures=st.integers(0, 5), gaps=st.lists(st.integers(1, 30), min_size=7, max_size=7))
def test_a_job_that_only_fails_is_restarted_exactly_as_often_as_allowed(
    max_failures: int, gaps: list[int]
) -> None:
    async def run() -> None:
        restarts: dict[str, Any] = {
            "maxFailures": max_failures,
            "backoff": {"initialSeconds": 1, "maxSeconds": 5},
        }
        world = World(restarts=restarts)
        for gap in gaps:
            await world.run_until_settled(rounds=5 + gap)
            _end(world, 0, 1)
        await world.run_until_settled(rounds=10)
        assert world.status.phase is Phase.FAILED
        assert world.status.restarts.total == max_failures

    asyncio.run(run())


def test_the_happenings_have_an_effect() -> None:
    """A run without events would prove nothing."""

    async def run() -> None:
        world = World()
        story = [
            ("a minute passes", 0, 3),
            ("a pod fails", 0, 3),
            ("a machine is taken back", 1, 3),
            ("a commit", 0, 3),
        ]
        await play(world, story)
        assert world.status.restarts.total == 2
        assert world.status.checkpoint is not None

    asyncio.run(run())


pytestmark = pytest.mark.timeout(600)
