"""Test the bound on starts that commit nothing, and the wait between starts that come to nothing at once."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from fake_cluster.kubelets import termination_message, training_report
from fake_cluster.world import World, training_job
from stepkeeper.contract import CommitPoint
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Bookkeeping
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.starts import was_edited

SUSPENDED = (ConditionStatus.TRUE, "NoNewCheckpoint")
SHORT_WAITS = {"backoff": {"initialSeconds": 1, "maxSeconds": 8}}
STARTS_AT_ONCE = {"backoff": {"initialSeconds": 0, "maxSeconds": 0}}
IMAGE = {"spec": {"containers": [{"name": "trainer", "image": "trainer:mended"}]}}


async def running(**spec: Any) -> World:
    world = World(**spec)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RUNNING
    return world


def stop_with_75(world: World, **last_word: Any) -> None:
    for pod in world.pods:
        world.controllers.end_pod(pod, 75, message=termination_message(75, **last_word))


def exceed_limits(world: World) -> None:
    """Let the kubelet end a pod that used more ephemeral storage than its limit: no node lacks anything."""
    world.controllers.end_pod(world.pods[0], 137)
    dead = world.cluster.objects["pods", "default", world.pods[0]["metadata"]["name"]]
    text = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."
    world.cluster.put("pods", dead | {"status": dead["status"] | {"reason": "Evicted", "message": text}})


def disrupt(world: World, reason: str) -> None:
    world.controllers.disrupt(world.pods[0], reason)
    world.controllers.end_pod(world.pods[0], 143)


NEUTRAL: dict[str, Callable[[World], None]] = {
    "75 without a word": stop_with_75,
    "75 after a notice that the process names itself": lambda world: stop_with_75(world, notice="file"),
    "spot preemptions": lambda world: disrupt(world, "TerminationByKubelet"),
    "evictions": lambda world: disrupt(world, "EvictionByEvictionAPI"),
}


async def end_all_starts(world: World, end: Callable[[World], None], *, most: int = 40) -> int:
    """End each start as soon as all its pods run. Return how many there were until the job stands still."""
    for n_starts in range(most):
        for _ in range(400):
            if world.phase() is Phase.RUNNING:
                break
            if world.phase() in {Phase.FAILED, Phase.SUSPENDED}:
                return n_starts
            await world.run_until_settled(rounds=1)
        assert world.phase() is Phase.RUNNING, world.condition("Running")
        end(world)
        await world.reconcile()
        await world.run_until_settled(rounds=3)
    return most


@pytest.mark.parametrize("end", NEUTRAL.values(), ids=NEUTRAL)
async def test_ten_starts_without_a_commit_suspend_the_job_whatever_ends_them(
    end: Callable[[World], None],
) -> None:
    world = await running(restarts=SHORT_WAITS)
    assert await end_all_starts(world, end) == 10
    assert world.condition("Suspended") == SUSPENDED
    assert world.pods == []
    said = next(c for c in world.status.conditions if c.type == "Suspended")
    assert "10 starts in a row" in said.message
    assert "spec.restarts.maxStartsWithoutCheckpoint allows 10" in said.message
    assert "spec.suspend" in said.message
    assert await world.record_writes(rounds=3) == []
    world.restart_operator()
    assert await world.record_writes(rounds=3) == []


async def test_what_was_only_restored_is_no_commit() -> None:
    world = await running(restarts=SHORT_WAITS)
    world.receive_report(training_report(sequence=7, step=120))
    await world.reconcile()
    assert world.status.bookkeeping.starts_without_checkpoint == 0
    n_starts = await end_all_starts(
        world,
        lambda world: stop_with_75(
            world, restored=CommitPoint(sequence=7, step=120), root="r", notice="file"
        ),
    )
    assert n_starts == 11  # the first has committed
    assert world.condition("Suspended") == SUSPENDED


async def test_who_uses_more_than_its_limits_fails_by_itself() -> None:
    world = await running()
    assert await end_all_starts(world, exceed_limits) == 4
    assert world.condition("Failed") == (ConditionStatus.TRUE, "MaxFailuresReached")
    failed = next(c for c in world.status.conditions if c.type == "Failed")
    assert "exceeds the total limit of containers 1Gi" in failed.message
    assert world.causes == ["ApplicationError"] * 4


async def test_a_pod_that_its_node_could_not_keep_is_evicted_by_the_cluster() -> None:
    world = await running()
    world.controllers.disrupt(world.pods[0], "TerminationByKubelet")
    exceed_limits(world)
    await world.run_until_settled()
    assert world.causes == ["Eviction", None]


async def test_the_limit_is_the_jobs_own_and_failures_count_too() -> None:
    limits = {"maxFailures": 100, "resetOnNewCheckpoint": False, "maxStartsWithoutCheckpoint": 2}
    world = await running(restarts=limits)
    n_starts = await end_all_starts(world, lambda world: world.controllers.end_pod(world.pods[0], 1))
    assert n_starts == 2
    assert world.condition("Suspended") == SUSPENDED


async def test_a_commit_counts_anew() -> None:
    world = await running(restarts=STARTS_AT_ONCE)
    for sequence in range(1, 15):
        world.receive_report(training_report(sequence=sequence, step=sequence))
        stop_with_75(world)
        await world.run_until_settled()
        assert world.phase() is Phase.RUNNING
        assert world.status.bookkeeping.starts_without_checkpoint == 1


GOES_ON: dict[str, dict[str, Any]] = {
    "its template is changed": {"template": IMAGE},
    "more starts are allowed": {"restarts": SHORT_WAITS | {"maxStartsWithoutCheckpoint": 11}},
}


@pytest.mark.parametrize("edit", GOES_ON.values(), ids=GOES_ON)
async def test_a_job_that_came_to_nothing_goes_on_when(edit: dict[str, Any]) -> None:
    world = await running(restarts=SHORT_WAITS)
    await end_all_starts(world, stop_with_75)
    world.edit(**edit)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.condition("Suspended") == (ConditionStatus.FALSE, "NotSuspended")


async def test_a_job_that_came_to_nothing_goes_on_when_it_is_suspended_and_resumed() -> None:
    world = await running(restarts=SHORT_WAITS)
    await end_all_starts(world, stop_with_75)
    world.edit(suspend=True)
    await world.run_until_settled()
    assert world.condition("Suspended") == (ConditionStatus.TRUE, "Requested")
    world.edit(suspend=False)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.status.bookkeeping.starts_without_checkpoint == 1


async def test_a_person_is_warned_of_a_job_that_came_to_nothing() -> None:
    world = await running(restarts={"maxStartsWithoutCheckpoint": 1, "maxFailures": 0})
    stop_with_75(world)
    await world.run_until_settled()
    (event,) = [raw for raw in world.cluster.list_objects("events") if raw["reason"] == "Suspended"]
    assert event["type"] == "Warning"
    assert "1 start has committed no new checkpoint" in event["note"]
    assert b'stepkeeper_starts_without_checkpoint{job="lm",namespace="default"} 1.0' in world.metrics.render()


async def test_starts_that_end_at_once_wait_ever_longer_and_the_pods_are_not_there_meanwhile() -> None:
    world = await running(restarts={"backoff": {"initialSeconds": 100, "maxSeconds": 300}})
    begins: list[float] = []
    for _ in range(5):
        start = world.status.attempts[-1].start
        begins.append(start)
        stop_with_75(world)
        await world.reconcile()
        while world.status.attempts[-1].start == start:
            await world.run_until_settled(rounds=1)
            if world.status.bookkeeping.not_before is not None:
                assert world.phase() is Phase.RESTARTING
        await world.run_until_settled(rounds=3)
        assert world.phase() is Phase.RUNNING
    begins.append(world.status.attempts[-1].start)
    waits = [later - earlier for earlier, later in itertools.pairwise(begins)]
    assert waits[0] < 30  # one is bad luck
    for wait, least in zip(waits[1:], (100, 200, 300, 300), strict=True):
        assert least <= wait < least + 30


async def test_a_job_that_waits_has_no_pods_and_says_until_when() -> None:
    world = await running(restarts={"backoff": {"initialSeconds": 600, "maxSeconds": 600}})
    stop_with_75(world)
    await world.run_until_settled()
    stop_with_75(world)
    await world.reconcile()
    await world.run_until_settled(rounds=20)
    assert world.pods == []
    assert world.phase() is Phase.RESTARTING
    assert world.condition("Suspended") == (ConditionStatus.FALSE, "NotSuspended")
    running_ = next(c for c in world.status.conditions if c.type == "Running")
    assert "status.bookkeeping.notBefore" in running_.message
    assert await world.record_writes(rounds=3) == []


async def test_a_start_that_ran_for_long_is_followed_by_the_next_at_once() -> None:
    world = await running()
    for _ in range(5):
        world.now += 3600
        stop_with_75(world)
        await world.run_until_settled(rounds=5)
        assert world.phase() is Phase.RUNNING
        assert world.status.bookkeeping.not_before is None


async def test_a_mended_image_does_not_wait_for_the_broken_ones_back_off() -> None:
    world = await running(restarts={"backoff": {"initialSeconds": 600, "maxSeconds": 3600}})
    for _ in range(3):
        world.controllers.end_pod(world.pods[0], 1)
        await world.run_until_settled(rounds=4)
    assert world.status.bookkeeping.not_before is not None
    world.edit(template=IMAGE)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.status.bookkeeping.not_before is None
    assert [(e.cause, e.count) for e in world.status.restarts.by_cause] == [("ApplicationError", 3)]


async def test_unseen_starts_count_unless_something_was_committed_meanwhile() -> None:
    world = await running()
    world.stop_operator()
    for _ in range(3):
        stop_with_75(world)
        world.controllers.sync()
    world.restart_operator()
    await world.reconcile()
    assert world.status.bookkeeping.starts_without_checkpoint == 4
    world.stop_operator()
    for _ in range(12):
        stop_with_75(world)
        world.controllers.sync()
    world.restart_operator()
    world.receive_report(training_report(sequence=9, step=9))
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING


ENDS: list[Callable[[World], None]] = [
    *NEUTRAL.values(),
    exceed_limits,
    lambda world: world.controllers.end_pod(world.pods[0], 1),
    lambda world: world.controllers.end_pod(world.pods[-1], 78),
    lambda world: disrupt(world, "PreemptionByScheduler"),
    lambda world: world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0),
    lambda world: stop_with_75(world, restored=CommitPoint(sequence=1, step=1), root="r"),
]


@pytest.mark.parametrize("seed", range(8))
async def test_no_mixture_of_ends_gets_more_starts_than_are_allowed(seed: int) -> None:
    chance = random.Random(seed)
    limit = chance.randint(2, 6)
    restarts = {"maxFailures": limit, "resetOnNewCheckpoint": False, "maxStartsWithoutCheckpoint": limit}
    world = await running(restarts=restarts | STARTS_AT_ONCE, spot=chance.random() < 0.5)
    committed_in = 0
    for sequence in range(1, 25):
        if world.phase() is Phase.RUNNING:
            if sequence < 10 and chance.random() < 0.2:
                world.receive_report(training_report(sequence=sequence, step=sequence))
                await world.reconcile()
                committed_in = world.status.attempts[-1].number
            chance.choice(ENDS)(world)
        if chance.random() < 0.1:
            world.restart_operator()
        await world.run_until_settled(rounds=chance.randint(1, 6))
        assert world.status.attempts[-1].number - committed_in <= limit
    world.now += 300
    await world.run_until_settled()
    assert world.phase() in {Phase.SUSPENDED, Phase.FAILED}
    assert await world.record_writes(rounds=3) == []


async def start_unseen(world: World, n_starts: int) -> float:
    """Restart the job so often while no operator watches. Return in how many seconds the next one looks again."""
    before = world.status.bookkeeping.starts_without_checkpoint
    world.stop_operator()
    for _ in range(n_starts):
        stop_with_75(world)
        world.controllers.sync()
    world.restart_operator()
    again_s = await world.reconcile()
    assert again_s is not None
    assert world.status.bookkeeping.starts_without_checkpoint == before + n_starts
    return again_s


def is_to_stop(world: World) -> bool:
    assert world.jobset is not None
    return bool(world.jobset["spec"].get("suspend"))


async def test_a_job_that_committed_while_nobody_watched_runs_on_until_its_pods_have_reported() -> None:
    world = await running()
    await start_unseen(world, 12)
    assert not is_to_stop(world)
    world.now += 10
    world.receive_report(training_report(sequence=9, step=9))
    await world.reconcile()
    world.now += 60
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.causes[-1] is None
    assert world.status.bookkeeping.starts_without_checkpoint <= 1


async def test_a_job_that_had_more_starts_while_nobody_watched_is_suspended_while_it_runs() -> None:
    world = await running(restarts={"maxFailures": 2, "maxStartsWithoutCheckpoint": 3})
    assert await start_unseen(world, 4) <= 60
    world.receive_report(training_report(sequence=0, step=0, root=None, head=None, commits=()))
    world.now += 59
    assert await world.reconcile() == 1
    assert not is_to_stop(world)
    world.now += 1
    await world.run_until_settled()
    assert world.condition("Suspended") == SUSPENDED
    assert world.pods == []


async def test_a_first_report_without_a_new_commit_suspends_what_had_more_starts_than_allowed() -> None:
    world = await running(restarts=STARTS_AT_ONCE)
    world.receive_report(training_report(sequence=9, step=9))
    await world.reconcile()
    await start_unseen(world, 12)
    assert not is_to_stop(world)
    world.receive_report(training_report(sequence=9, step=9))
    await world.run_until_settled()
    assert world.condition("Suspended") == SUSPENDED


async def test_a_lower_limit_ends_no_start_that_was_allowed() -> None:
    world = await running(restarts=STARTS_AT_ONCE)
    await start_unseen(world, 4)
    world.edit(restarts=STARTS_AT_ONCE | {"maxStartsWithoutCheckpoint": 3})
    world.restart_operator()
    world.now += 600
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    stop_with_75(world)
    await world.run_until_settled()
    assert world.condition("Suspended") == SUSPENDED


async def test_what_is_being_suspended_is_not_resumed_by_the_next_operator() -> None:
    world = await running(restarts={"maxFailures": 2, "maxStartsWithoutCheckpoint": 3})
    await start_unseen(world, 4)
    world.now += 60
    await world.reconcile()
    assert is_to_stop(world)
    world.restart_operator()
    await world.reconcile()
    assert is_to_stop(world)


async def test_a_refused_edit_of_what_comes_to_nothing_neither_counts_anew_nor_ends_its_waits() -> None:
    world = await running(restarts=SHORT_WAITS)
    world.edit(template={"metadata": {"labels": {"controller-uid": "x"}}} | IMAGE)
    await world.run_until_settled(rounds=2)
    assert world.condition("Accepted") == (ConditionStatus.FALSE, "ReservedLabel")
    assert await end_all_starts(world, stop_with_75) == 10
    assert world.condition("Suspended") == SUSPENDED
    world.edit(template=IMAGE)
    await world.run_until_settled()
    assert world.phase() is Phase.RUNNING
    assert world.status.bookkeeping.starts_without_checkpoint == 1


async def test_whoever_deletes_the_jobset_again_and_again_makes_nobody_wait() -> None:
    world = await running(restarts={"backoff": {"initialSeconds": 600, "maxSeconds": 600}})
    for number in range(2, 6):
        world.cluster.mark_deleted("jobsets", "default", "lm", grace_s=0)
        await world.run_until_settled(rounds=6)
        assert world.phase() is Phase.RUNNING
        assert world.status.attempts[-1].number == number


def test_without_its_machines_nobody_can_tell_whether_a_job_was_edited() -> None:
    tpu = {"accelerator": "v5e", "topology": "2x2", "queuedResourceName": "pool"}
    raw = training_job(placement={"tpu": tpu})
    raw["metadata"]["uid"] = "u"
    job = CheckpointedTrainingJob.model_validate(raw)
    assert not was_edited(job, Observed(), Bookkeeping(started_template="with its machines"))
