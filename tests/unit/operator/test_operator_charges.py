"""Test what an end costs: the restart that it is counted for, and the end of the job where none is left."""

from collections.abc import Callable
from typing import Any, Final

import pytest

from fake_cluster.kubelets import training_report
from fake_cluster.stories import fail, fail_behind_a_peer, play, run_job, stories, table
from fake_cluster.world import World
from stepkeeper_operator.api.v1alpha1.trainingjob import BackoffSpec, RestartsSpec
from stepkeeper_operator.api.v1alpha1.trainingjob_status import CauseCount, RestartsStatus
from stepkeeper_operator.errors import ApiError
from stepkeeper_operator.training_jobs.attempts import budgets

NO_RESTART: Final = {"maxFailures": 0}
ONE: Final = {"maxFailures": 1}
FATAL: Final = {"fatalExitCodes": [42]}
PATIENT: Final = {"maxFailures": 3, "backoff": {"initialSeconds": 600, "maxSeconds": 3600}}
TWO_SLICES: Final = {"tpu": {"accelerator": "v5p", "topology": "2x2x2", "slices": 2}}
DISRUPTIONS: Final = {"SpotPreemption", "QueuePreemption", "SchedulerPreemption", "Maintenance"} | {
    "NodeFailure",
    "Eviction",
    "Disruption",
}
FAILED_FOR_GOOD: Final = "condition Failed True/MaxFailuresReached"


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


@pytest.mark.parametrize(("towards", "is_over"), [(0, False), (3, True)])
def test_a_cause_of_a_newer_operator_counts_as_often_as_that_one_counted_it(
    towards: int, *, is_over: bool
) -> None:
    """So a rollback neither refills a budget nor burns it."""
    spec, known = RestartsSpec(max_disruptions=3), counted(Reboot=(5, towards), Eviction=(0, 0))
    assert budgets.count_disruptions(spec, known) == known
    assert bool(budgets.explain_exhausted_budget(spec, known, "Eviction", restarted=False)) is is_over


def test_a_back_off_doubles_up_to_its_limit() -> None:
    limits = budgets.limits_of(RestartsSpec(backoff=BackoffSpec(initial_seconds=10, max_seconds=60)))
    assert [limits.compute_wait_s(n) for n in (0, 1, 2, 3, 99)] == [10, 20, 40, 60, 60]


async def test_a_spot_preemption_restarts_in_place_and_costs_no_failure() -> None:
    story = "preempt, run, causes SpotPreemption -, costs SpotPreemption=1/0, phase Running, jobsets 1"
    world = await play(await run_job(spot=True), f"{story}, events SpotPreemption 1, latest 7 120")
    assert world.jobset is not None
    assert world.jobset["status"].items() >= {"restarts": 1, "restartsCountTowardsMax": 0}.items()


async def test_failures_restart_in_place_twice_then_in_a_new_jobset_after_a_back_off_then_end_the_job() -> (
    None
):
    world = await play(await run_job(), "fail, run, fail, run, jobsets 1, fail, run 4, phase Restarting")
    assert world.status.next_start_time == (world.status.attempts[-1].end or 0) + 40
    await play(world, "run 25, phase Running, jobsets 2")
    assert world.jobset is not None
    assert world.jobset["spec"]["failurePolicy"]["maxRestarts"] == 0
    await play(world, f"fail, run, phase Failed, {FAILED_FOR_GOOD}, costs ApplicationError=3/3, rests")


async def test_a_new_commit_refills_the_failure_budget() -> None:
    world = await run_job(restarts=ONE)
    for sequence in (1, 2, 3):
        await play(world, f"report {sequence} {100 * sequence}, look, fail, run 25, phase Running")
    assert world.status.restarts.total == 3


Ending = Callable[[World], None]
OWNER: Final = "the root is owned by default/other"
BEFORE_JOBSET, AFTER_ITS_RESTART = "look", "act, act, act"


@pytest.mark.parametrize("noticed", [BEFORE_JOBSET, AFTER_ITS_RESTART])
@table(
    "restarts, end, reason, words",
    {
        "a failure": (NO_RESTART, lambda world: fail(world, error="bad"), "MaxFailuresReached", "bad"),
        "one that JobSet doesn't count": (NO_RESTART, fail_behind_a_peer, "MaxFailuresReached", "ValueError"),
        "a fatal code": (FATAL, lambda world: fail(world, 42), "FatalExitCode", "42"),
        "a fatal code behind a shell": (FATAL, lambda world: fail(world, said=42), "FatalExitCode", "42"),
        "another claim": ({}, lambda world: fail(world, 77, error=OWNER), "RootOwnedByAnother", OWNER),
        "another claim behind a shell": (
            {},
            lambda world: fail(world, said=77),
            "RootOwnedByAnother",
            "claim",
        ),
    },
)
async def test_the_job_ends_with(
    restarts: dict[str, Any], end: Ending, reason: str, words: str, noticed: str
) -> None:
    world = await run_job(restarts=restarts)
    end(world)
    await play(world, f"{noticed}, run, phase Failed, condition Failed True/{reason}, rests")
    await play(world, f"message Failed {words}")
    assert [pod for pod in world.pods if pod["status"]["phase"] == "Running"] == []
    assert world.causes[1:] in ([], ["Requested"])
    assert all(attempt.end is not None for attempt in world.status.attempts)


ONE_FAILURE: Final = "run, causes ApplicationError -, costs ApplicationError=1/1"


@stories(
    {
        "disruptions, once there is a limit": (
            "preempt, run, costs SpotPreemption=1/0, limit maxDisruptions 2, preempt, run, "
            "costs SpotPreemption=2/2, preempt, run, condition Failed True/MaxDisruptionsReached, pods 0, gone"
        ),
        "a trainer's own 137, its dead pod is deleted": f"end 137, look, wait 5, delete-pods, {ONE_FAILURE}",
        "a trainer's own 137, unseen": f"away, end 137, wait 5, delete-pods, restart, {ONE_FAILURE}",
        "a failure that JobSet has not told of": (
            "late jobsets, fail, look, act, wait 60, look, causes ApplicationError -, wait 2, look, away, "
            "end 75, act, end 75, act, restart, run, attempts 4, costs ApplicationError=1/1 Requested=2/0"
        ),
        "two at once": (
            "limit maxFailures 1, look, late jobsets, preempt, act, wait 2, late jobsets jobs pods, fail, act, "
            "hear, look, wait 2, look, causes SpotPreemption ApplicationError -, inferred False True False, "
            "costs ApplicationError=1/1 SpotPreemption=1/0"
        ),
        # The second is corrected while its evidence can come.
        "two at once, of the first nothing was seen": (
            "limit maxFailures 1, look, late jobsets pods jobs, preempt, act, wait 2, fail, act, hear, look, "
            "deliver, run 3, phase Running, wait 2, look, causes Disruption ApplicationError -, "
            "inferred True False False, costs ApplicationError=1/0 Disruption=1/0"
        ),
    }
)
async def test_each_end_is_charged_to_its_own_cause_and_once(story: str) -> None:
    await play(await run_job(spot=True), story)


async def test_a_disruption_of_a_pod_that_is_being_deleted_for_a_failure_does_not_hide_it() -> None:
    story = "stop 20 143, fail, act, look, wait 5, disrupt 1 PreemptionByScheduler, run 30"
    await play(await run_job(restarts=NO_RESTART), f"{story}, causes ApplicationError, {FAILED_FOR_GOOD}")


async def test_a_failure_that_is_counted_while_the_job_is_suspended_is_charged_and_delays_nothing() -> None:
    story = "fail, look, suspend, run 4, resume, look, resumed, away, act, fail, act, act, act, restart, run"
    await play(await run_job(restarts=PATIENT), f"{story}, costs ApplicationError=2/2")


BOTH_FAIL: Final = "fail 1 0, fail 1 1"
LOST_LATER: Final = "lose n4, wait 5, run 40, causes NodeFailure -, costs NodeFailure=1/0"
NEVER_LOST: Final = "wait 120, run 2, phase Failed, causes ApplicationError"


@stories(
    {
        "lost": f"stick n4, {BOTH_FAIL}, run 6, phase Restarting, wait 40, {LOST_LATER}",
        "lost, seen by another operator": (
            f"stick n4, {BOTH_FAIL}, run 6, phase Restarting, wait 40, restart, {LOST_LATER}"
        ),
        "stuck": f"stick n4, {BOTH_FAIL}, run 6, phase Restarting, {NEVER_LOST}",
        "well": f"{BOTH_FAIL}, run 6, phase Failed, {NEVER_LOST}",
    },
)
async def test_a_failed_slice_ends_the_job_once_no_node_of_another_can_explain_it(story: str) -> None:
    await play(await run_job(placement=TWO_SLICES, restarts=NO_RESTART), story)


@pytest.mark.parametrize("then", ["wait 30, taint", "wait 300, taint, restart"])
async def test_a_taint_on_the_node_of_a_dead_pod_changes_no_cause_and_skips_no_back_off(then: str) -> None:
    def taint(world: World) -> None:
        dead = next(pod for pod in world.pods if pod["status"]["phase"] == "Failed")
        world.controllers.disrupt(dead, "DeletionByTaintManager")

    world = await play(await run_job(restarts=PATIENT), "fail, run 4, fail, run 4, fail, run 4")
    before = world.status.next_start_time
    assert before is not None
    await play(world, f"{then}, run 6, phase Restarting", taint=taint)
    assert (world.causes, world.status.next_start_time) == (["ApplicationError"] * 3, before)


async def test_an_edit_that_is_taken_back_before_the_jobset_is_deleted_leaves_an_attempt_that_is_charged() -> (
    None
):
    world = await run_job(restarts=NO_RESTART)
    before = world.job.spec.template
    world.cluster.refusals["delete", "jobsets"] = ApiError(500, "etcdserver: leader changed")
    with pytest.raises(ApiError):
        await play(world, "edit image typo, look")
    world.edit(template=before)
    await play(
        world, f"accept, restart, run, phase Running, causes Requested -, fail, run, {FAILED_FOR_GOOD}"
    )


async def test_a_notice_that_is_longer_than_the_status_can_hold_is_cut() -> None:
    world = await run_job()
    world.receive_report(training_report(1, 100, notice="x" * 131))
    await world.reconcile()
    assert world.status.attempts[0].notice == "x" * 64
