"""Test what an end costs: the restart that it is counted for, and the end of the job where none is left."""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest

from fake_cluster.kubelets import termination_message, training_report
from fake_cluster.stories import count_restarts, end_pods, fail, message_of, run_job
from fake_cluster.world import World
from stepkeeper.contract import ExitCode
from stepkeeper_operator.api.v1alpha1.conditions import ConditionStatus, Phase
from stepkeeper_operator.api.v1alpha1.trainingjob import BackoffSpec, RestartsSpec
from stepkeeper_operator.api.v1alpha1.trainingjob_status import CauseCount, RestartsStatus
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.training_jobs.attempts import budgets

NO_RESTART: Final = {"maxFailures": 0}
ONE: Final = {"maxFailures": 1}
FATAL: Final = {"fatalExitCodes": [42]}
TWO_SLICES: Final = {"tpu": {"accelerator": "v5p", "topology": "2x2x2", "slices": 2}}
DISRUPTIONS: Final = {"SpotPreemption", "QueuePreemption", "SchedulerPreemption", "Maintenance"} | {
    "NodeFailure",
    "Eviction",
    "Disruption",
}


def counted(**by_cause: tuple[int, int]) -> RestartsStatus:
    entries = tuple(
        CauseCount(cause=cause, count=count, counted_towards_limit=towards)
        for cause, (count, towards) in by_cause.items()
    )
    return RestartsStatus(total=sum(entry.count for entry in entries), by_cause=entries)


@pytest.mark.parametrize("cause", [*sorted(DISRUPTIONS), "Requested"])
def test_each_disruption_uses_up_max_disruptions_and_nothing_where_there_is_no_limit(cause: str) -> None:
    spec, known, counts = RestartsSpec(max_disruptions=1), counted(**{cause: (1, 0)}), cause in DISRUPTIONS
    assert budgets.count_disruptions(spec, known) == counted(**{cause: (1, int(counts))})
    assert budgets.count_disruptions(RestartsSpec(), known) == known
    assert bool(budgets.explain_exhausted_budget(spec, known, cause, restarted=False)) is counts
    assert budgets.explain_exhausted_budget(spec, known, cause, restarted=True) is None
    assert budgets.explain_exhausted_budget(RestartsSpec(), known, cause, restarted=False) is None
    assert budgets.explain_exhausted_budget(spec, counted(Requested=(5, 0)), cause, restarted=False) is None


def test_a_back_off_doubles_up_to_its_limit() -> None:
    spec = RestartsSpec(backoff=BackoffSpec(initial_seconds=10, max_seconds=60))
    limits = budgets.limits_of(spec)
    assert [limits.compute_wait_s(n) for n in (0, 1, 2, 3, 99)] == [10, 20, 40, 60, 60]


async def test_a_spot_preemption_restarts_in_place_and_costs_no_failure() -> None:
    world = await run_job(spot=True)
    world.preempt()
    await world.run_until_settled()
    assert world.causes == ["SpotPreemption", None]
    assert world.jobset is not None
    assert world.jobset["status"] == world.jobset["status"] | {"restarts": 1, "restartsCountTowardsMax": 0}
    assert count_restarts(world) == {"SpotPreemption": (1, 0)}
    assert world.phase() is Phase.RUNNING
    assert "SpotPreemption" in world.events
    assert world.status.checkpoint is not None
    assert world.status.checkpoint.latest is not None
    assert world.status.checkpoint.latest.step == 120, "no report said so, but the pods did"


async def test_disruptions_are_bounded_where_the_user_says_so() -> None:
    world = await run_job(spot=True)
    for limit, count in (({}, (1, 0)), ({"maxDisruptions": 2}, (2, 2))):
        world.edit(restarts=limit)
        world.preempt()
        await world.run_until_settled()
        assert count_restarts(world) == {"SpotPreemption": count}
    world.preempt()
    await world.run_until_settled()
    assert world.condition("Failed") == (ConditionStatus.TRUE, "MaxDisruptionsReached")
    assert (world.pods, world.jobset) == ([], None)


async def test_failures_restart_in_place_twice_then_in_a_new_jobset_after_a_back_off_then_end_the_job() -> (
    None
):
    world = await run_job()
    for _ in range(2):
        fail(world)
        await world.run_until_settled()
    assert world.status.operator.job_sets == 1
    fail(world)
    await world.run_until_settled(rounds=4)
    assert world.phase() is Phase.RESTARTING
    assert world.status.next_start_time == (world.status.attempts[-1].end or 0) + 40
    await world.run_until_settled(rounds=25)
    assert (world.phase(), world.status.operator.job_sets) == (Phase.RUNNING, 2)
    assert world.jobset is not None
    assert world.jobset["spec"]["failurePolicy"]["maxRestarts"] == 0
    fail(world)
    await world.run_until_settled()
    assert world.phase() is Phase.FAILED
    assert world.condition("Failed") == (ConditionStatus.TRUE, "MaxFailuresReached")
    assert world.status.restarts.total == 3
    assert await world.record_writes(rounds=3) == []


async def test_a_new_commit_refills_the_failure_budget() -> None:
    world = await run_job(restarts=ONE)
    for sequence in (1, 2, 3):
        world.receive_report(training_report(sequence=sequence, step=100 * sequence))
        await world.reconcile()
        fail(world)
        await world.run_until_settled(rounds=25)
        assert world.phase() is Phase.RUNNING
    assert world.status.restarts.total == 3


def fail_behind_a_peer(world: World) -> None:
    """Let one pod fail, and the other save first since its peer stops: JobSet counts no failure."""
    end_pods(world, 75, notice="peer", step=120)
    fail(world, index=1, error="ValueError: bad")


async def before_jobset(world: World) -> None:
    await world.reconcile()


async def after_jobset(world: World) -> None:
    for _ in range(3):
        world.controllers.sync()


Ending = Callable[[World], None]
NOTICED: Final = {"before JobSet acts": before_jobset, "after its restart": after_jobset}
OWNER: Final = "the root is owned by default/other"
FINAL: Final[dict[str, tuple[dict[str, Any], Ending, str, str]]] = {
    "a failure": (
        NO_RESTART,
        lambda world: fail(world, error="bad batch"),
        "MaxFailuresReached",
        "bad batch",
    ),
    "a failure that JobSet doesn't count": (
        NO_RESTART,
        fail_behind_a_peer,
        "MaxFailuresReached",
        "ValueError",
    ),
    "a fatal code": (FATAL, lambda world: fail(world, 42), "FatalExitCode", "42"),
    "a fatal code behind a shell": (FATAL, lambda world: fail(world, said=42), "FatalExitCode", "42"),
    "another claim": ({}, lambda world: fail(world, 77, error=OWNER), "RootOwnedByAnother", OWNER),
    "another claim behind a shell": ({}, lambda world: fail(world, said=77), "RootOwnedByAnother", "claim"),
}


@pytest.mark.parametrize("noticed", NOTICED.values(), ids=NOTICED)
@pytest.mark.parametrize(("restarts", "end", "reason", "words"), FINAL.values(), ids=FINAL)
async def test_the_job_ends_with(
    restarts: dict[str, Any],
    end: Ending,
    reason: str,
    words: str,
    noticed: Callable[[World], Awaitable[None]],
) -> None:
    world = await run_job(restarts=restarts)
    end(world)
    await noticed(world)
    await world.run_until_settled()
    assert world.phase() is Phase.FAILED
    assert world.condition("Failed") == (ConditionStatus.TRUE, reason)
    assert words in message_of(world, "Failed")
    assert [pod for pod in world.pods if pod["status"]["phase"] == "Running"] == []
    assert world.causes[1:] in ([], ["Requested"])
    assert all(attempt.end is not None for attempt in world.status.attempts)
    assert await world.record_writes(rounds=3) == []


@pytest.mark.parametrize("seen", [True, False])
async def test_a_trainer_that_ends_with_137_by_itself_is_charged_though_its_dead_pod_is_deleted(
    *, seen: bool
) -> None:
    world = await run_job()
    if not seen:
        world.stop_operator()
    end_pods(world, 137)
    await world.reconcile()
    world.now += 5
    for pod in world.pods:
        world.cluster.mark_deleted("pods", "default", pod["metadata"]["name"], grace_s=0)
    if not seen:
        world.restart_operator()
    await world.run_until_settled()
    assert world.causes == ["ApplicationError", None]
    assert count_restarts(world) == {"ApplicationError": (1, 1)}


async def two_ends_at_once(*delayed: str) -> World:
    """Let two restarts come at once, which the JobSet shows before the watches of `delayed` do."""
    world = await run_job(spot=True, restarts=ONE)
    world.delay_watches("jobsets", *delayed)
    world.preempt()
    world.controllers.sync()
    world.now += 2
    world.delay_watches("jobsets", "jobs", "pods")
    fail(world)
    world.controllers.sync()
    assert world.jobset is not None
    world.cache.record_jobset(world.jobset, deleted=False)
    await world.reconcile()
    return world


@pytest.mark.parametrize("delayed", [(), ("pods", "jobs")])
async def test_of_two_restarts_that_came_at_once_each_is_charged_to_its_own_cause(
    delayed: tuple[str, ...],
) -> None:
    world = await two_ends_at_once(*delayed)
    # Of the first nothing was seen, and the second is corrected while its evidence can come.
    first = "Disruption" if delayed else "SpotPreemption"
    if delayed:
        world.deliver_watches()
        await world.run_until_settled(rounds=3)
        assert world.phase() is Phase.RUNNING
    world.now += 2
    await world.reconcile()
    assert world.causes == [first, "ApplicationError", None]
    assert [bool(attempt.inferred) for attempt in world.status.attempts] == [
        bool(delayed),
        not delayed,
        False,
    ]
    assert count_restarts(world) == {"ApplicationError": (1, int(not delayed)), first: (1, 0)}


async def test_a_failure_is_charged_once_though_the_watch_of_jobsets_is_behind() -> None:
    world = await run_job()
    world.delay_watches("jobsets")
    fail(world)
    await world.reconcile()
    world.controllers.sync()
    world.now += 60
    await world.reconcile()  # asks for the JobSet, which the job waits for
    assert world.causes == ["ApplicationError", None]
    world.now += 2
    await world.reconcile()  # believes the cache, which knows of no restart yet
    world.stop_operator()
    for _ in range(2):
        end_pods(world, ExitCode.SAVED)
        world.controllers.sync()
    world.restart_operator()
    await world.run_until_settled()
    assert len(world.causes) == 4
    assert world.causes.count("ApplicationError") == 1


@pytest.mark.parametrize("node", ["lost", "lost, seen by another operator", "stuck", "well"])
async def test_a_failed_slice_ends_the_job_once_no_node_of_another_can_explain_it(node: str) -> None:
    world = await run_job(placement=TWO_SLICES, restarts=NO_RESTART)
    if node != "well":
        world.controllers.stuck.add("n4")
    for index in (0, 1):
        fail(world, index=index)
    await world.run_until_settled(rounds=6)
    assert world.phase() is (Phase.FAILED if node == "well" else Phase.RESTARTING)
    if "lost" in node:
        world.now += 40
        if "another" in node:
            world.restart_operator()
        world.lose_node("n4")
        for _ in range(20):
            world.now += 5
            await world.run_until_settled(rounds=2)
        assert world.causes == ["NodeFailure", None]
        assert count_restarts(world) == {"NodeFailure": (1, 0)}
    else:
        world.now += world.settings.reattribution_s
        await world.run_until_settled(rounds=2)
        assert (world.phase(), world.causes) == (Phase.FAILED, ["ApplicationError"])


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_taint_on_the_node_of_a_dead_pod_changes_no_cause_and_skips_no_back_off(
    *, restarted: bool
) -> None:
    world = await run_job(restarts={"backoff": {"initialSeconds": 600, "maxSeconds": 3600}})
    for _ in range(3):
        fail(world)
        await world.run_until_settled(rounds=4)
    before = world.status.next_start_time
    assert before is not None
    world.now += 300 if restarted else 30
    dead = next(pod for pod in world.pods if pod["status"]["phase"] == "Failed")
    world.controllers.disrupt(dead, "DeletionByTaintManager")
    if restarted:
        world.restart_operator()
    await world.run_until_settled(rounds=6)
    assert world.causes == ["ApplicationError"] * 3
    assert world.status.next_start_time == before
    assert world.phase() is Phase.RESTARTING


async def test_a_disruption_of_a_pod_that_is_being_deleted_for_a_failure_does_not_hide_it() -> None:
    world = await run_job(restarts=NO_RESTART)
    world.controllers.kubelets.stop_s = 20
    fail(world)
    world.controllers.sync()
    await world.reconcile()
    world.now += 5
    world.controllers.disrupt(world.pods[1], "PreemptionByScheduler")
    await world.run_until_settled(rounds=30)
    assert world.causes == ["ApplicationError"]
    assert world.condition("Failed") == (ConditionStatus.TRUE, "MaxFailuresReached")


async def test_an_edit_that_is_taken_back_before_the_jobset_is_deleted_leaves_an_attempt_that_is_charged() -> (
    None
):
    world = await run_job(restarts=NO_RESTART)
    before = world.job.spec.template
    world.edit(template={"spec": {"containers": [{"name": "trainer", "image": "typo:2"}]}})
    world.cluster.refusals["delete", "jobsets"] = ApiError(500, "etcdserver: leader changed")
    with pytest.raises(ApiError):
        await world.reconcile()
    del world.cluster.refusals["delete", "jobsets"]
    world.edit(template=before)
    world.restart_operator()
    await world.run_until_settled()
    assert (world.phase(), world.causes) == (Phase.RUNNING, ["Requested", None])
    fail(world)
    await world.run_until_settled()
    assert world.condition("Failed") == (ConditionStatus.TRUE, "MaxFailuresReached")


async def test_a_failure_that_is_counted_while_the_job_is_suspended_is_charged_and_delays_nothing() -> None:
    world = await run_job(restarts={"maxFailures": 3, "backoff": {"initialSeconds": 600, "maxSeconds": 3600}})
    fail(world)
    await world.reconcile()
    world.edit(suspend=True)
    await world.run_until_settled(rounds=4)
    world.edit(suspend=False)
    await world.reconcile()
    assert world.jobset is not None
    assert not world.jobset["spec"]["suspend"]
    world.stop_operator()
    world.controllers.sync()
    fail(world)
    for _ in range(3):
        world.controllers.sync()
    world.restart_operator()
    await world.run_until_settled()
    assert count_restarts(world) == {"ApplicationError": (2, 2)}


async def test_a_lost_node_that_explains_an_unseen_failure_charges_no_other_end() -> None:
    world = await run_job(placement=TWO_SLICES, spot=True, restarts=ONE)
    world.stop_operator()
    world.preempt()
    for _ in range(3):
        world.controllers.sync()
    world.now += 60
    world.controllers.stuck.add("n4")  # its kubelet is dead, its Node is still Ready
    for index in (0, 1):
        fail(world, index=index)
    world.controllers.sync()
    world.restart_operator()
    await world.reconcile()
    world.now += 35
    world.lose_node("n4")
    await world.reconcile()
    assert world.causes == ["Disruption", "NodeFailure", None]
    assert "ApplicationError" not in count_restarts(world)


async def test_a_fatal_code_of_another_slice_ends_the_job_after_jobset_has_restarted_it() -> None:
    world = await run_job(placement=TWO_SLICES, restarts=FATAL)
    world.controllers.kubelets.stop_s, world.controllers.kubelets.stop_code = 8, 42
    for pod in world.pods[:2]:
        message = termination_message(75, notice="peer", step=120)
        world.controllers.end_pod(pod, 75, message=message)
    await world.run_until_settled(rounds=30)
    assert world.condition("Failed") == (ConditionStatus.TRUE, "FatalExitCode")


async def test_a_notice_that_is_longer_than_the_status_can_hold_is_cut() -> None:
    world = await run_job()
    world.receive_report(training_report(1, 100, notice="x" * 131))
    await world.reconcile()
    assert world.status.attempts[0].notice == "x" * 64
