"""Test when the next start may be: the bound on starts that commit nothing, back-offs, and other waits."""

import itertools
from collections.abc import Callable
from typing import Any, Final

import pytest

from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_failed_job as failed_job
from fake_cluster.facts import make_history as history
from fake_cluster.facts import make_job, make_view
from fake_cluster.facts import make_observed as seen
from fake_cluster.facts import make_unedited_jobset as jobset
from fake_cluster.kubelets import termination_message, training_report
from fake_cluster.stories import disrupt, end_pods, fail, fail_behind_a_peer, play, run_job, table
from fake_cluster.world import World
from stepkeeper.contract import CommitPoint
from stepkeeper_operator.api.v1alpha1.conditions import Phase
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.observed import Observed
from stepkeeper_operator.training_jobs.policy import starts
from stepkeeper_operator.training_jobs.policy.plan import BACKING_OFF, Plan, hold_next_start

NOW: Final = 1000.0
RUNNING: Final = Attempt(number=1, start=900)
FAILED: Final = Attempt(number=1, start=900, end=990, cause="ApplicationError", message="exit 1")
EVICTED: Final = Attempt(number=1, start=900, end=990, cause="Eviction", message="drained")
EARLY: Final = EVICTED.model_copy(update={"end": 910})
ASKED_FOR: Final = EARLY.model_copy(update={"cause": "Requested", "kind": "Stopped"})
DONE: Final = Attempt(number=1, start=900, end=990, message="every pod exited 0")
FEW: Final = make_job(restarts={"maxStartsWithoutCheckpoint": 2})


SAVED: Final = seen(ended(1), ended(75, 1))
COUNTED: Final = seen(ended(1))
NEUTRAL_JOB: Final = failed_job(message="failed with exit code 75 matching FailJob rule")


def restarted(code: int, n_counted: int) -> Observed:
    return seen(ended(1), ended(code, 1), jobset=jobset(restarts=1, restarts_counted=n_counted))


@table(
    "known, observed, now, until",
    {
        "a restart that JobSet doesn't limit": (history(FAILED), SAVED, NOW, 1050),
        "one that JobSet limits": (history(FAILED), COUNTED, NOW, None),
        "one after an end that was not seen": (history(FAILED), seen(), NOW, None),
        "one after its back-off": (history(FAILED), SAVED, 1051.0, None),
        "what runs": (history(RUNNING, starts_without_checkpoint=9), SAVED, NOW, None),
        "what is done": (history(DONE, starts_without_checkpoint=9), SAVED, NOW, None),
        "a restart that JobSet didn't count": (history(FAILED), restarted(1, 0), NOW, 1050),
        "a restart that JobSet counted": (history(FAILED), restarted(75, 1), NOW, None),
        "a Job's exit code 75": (history(FAILED), seen(ended(1), jobs=(NEUTRAL_JOB,)), NOW, 1050),
        "a Job's failure": (history(FAILED), seen(ended(1), jobs=(failed_job(),)), NOW, None),
        "a failure before an edit": (history(FAILED, started_template="another"), SAVED, NOW, None),
        "deletions by a person": (history(ASKED_FOR, starts_without_checkpoint=6), COUNTED, 911.0, None),
        "a second start": (history(EARLY, starts_without_checkpoint=2), COUNTED, 911.0, 960),
        "a first start": (history(EARLY, starts_without_checkpoint=1), COUNTED, 911.0, None),
    },
)
def test_a_start_in_place_waits_or_not_for(
    known: JobHistory, observed: Observed, now: float, until: int | None
) -> None:
    job, plan = (
        make_job(restarts={"backoff": {"initialSeconds": 60, "maxSeconds": 60}}),
        Plan(history=known, job_set=None),
    )
    held = hold_next_start(make_view(job, observed, now=now), plan)
    assert until is None or held.history.next_start_time == until
    assert held.waiting == (None if until is None else BACKING_OFF)
    assert held.look_again_s == (None if until is None else until - now)


def heard(*, ordinal: tuple[int, int] = (0, 0), **more: Any) -> LastReport:
    return LastReport(report=training_report(7, 70, **more), ordinal=ordinal, received_at=NOW, pod_uid="p0")


@table(
    "attempt, n_starts, more, wait_s",
    {
        "it is new": (RUNNING, 3, {}, 40),
        "it is there for a minute": (RUNNING, 3, {"operator_started_at": NOW - 60}, None),
        "nothing runs": (RUNNING, 3, {"jobset": None}, None),
        "what runs is stopped": (RUNNING, 3, {"jobset": jobset(suspend=True)}, None),
        "it was told of a root": (RUNNING, 3, {"report": heard()}, None),
        "another start was": (RUNNING, 3, {"report": heard(ordinal=(0, 9))}, 40),
        "it was told of none": (RUNNING, 3, {"report": heard(root=None, commits=(), head=None)}, 40),
        "it is the last start": (RUNNING, 2, {}, None),
        "the start has ended": (EVICTED, 3, {}, None),
    },
)
def test_a_new_operator_lets_more_starts_run_for_a_minute_until_it_hears_of_a_root(
    attempt: Attempt, n_starts: int, more: dict[str, Any], wait_s: float | None
) -> None:
    known = history(attempt, starts_without_checkpoint=n_starts)
    base: dict[str, Any] = {"jobset": jobset(), "operator_started_at": NOW - 20}
    observed = Observed(**(base | more))
    view = make_view(FEW, observed, now=NOW)
    assert starts.compute_report_wait_s(view, known) == wait_s
    if wait_s:
        assert not starts.is_limit_reached(view, known)


SHORT_WAITS: Final = {"backoff": {"initialSeconds": 1, "maxSeconds": 8}}
RESTORED: Final[dict[str, Any]] = {
    "restored": CommitPoint(sequence=7, step=120),
    "root": "r",
    "notice": "file",
}


def fail_without_a_code(world: World) -> None:
    for pod in world.pods:
        world.cluster.put("pods", pod | {"status": {"phase": "Failed"}})


ENDS: Final[dict[str, Callable[[World], None]]] = {
    "75 without a word": lambda world: end_pods(world, 75),
    "75 after a notice, and what was only restored": lambda world: end_pods(world, 75, **RESTORED),
    "spot preemptions": lambda world: disrupt(world, "TerminationByKubelet"),
    "pods that fail without a code": fail_without_a_code,
    "failures": fail,
}


async def end_all_starts(world: World, end: Callable[[World], None]) -> int:
    """End each start as soon as all its pods run. Return how many there were until the job stands still."""
    for n_starts in range(20):
        for _ in range(400):
            if world.phase() is Phase.RUNNING:
                break
            if world.phase() in {Phase.FAILED, Phase.SUSPENDED}:
                return n_starts
            await world.run_until_settled(rounds=1)
        assert world.phase() is Phase.RUNNING, world.condition("Running")
        end(world)
        await play(world, "look, run 3")
    return 20


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
async def test_ten_starts_without_a_commit_suspend_the_job_whatever_ends_them(
    end: Callable[[World], None],
) -> None:
    world = await run_job(restarts=SHORT_WAITS | {"maxFailures": 100})
    assert await end_all_starts(world, end) == 10
    await play(world, "condition Suspended True/NoNewCheckpoint, pods 0, rests, restart, rests")
    said = world.message("Suspended")
    for words in ("10 starts in a row", "spec.restarts.maxStartsWithoutCheckpoint allows 10", "spec.suspend"):
        assert words in said
    (event,) = [raw for raw in world.cluster.list_objects("events") if raw["reason"] == "Suspended"]
    assert (event["type"], "10 starts in a row" in event["note"]) == ("Warning", True)


@pytest.mark.parametrize(
    ("change", "n_starts"),
    [
        ("edit image new, run", 1),
        ("limit maxStartsWithoutCheckpoint 3, run", 3),
        ("suspend, run, resume, run", 1),
    ],
)
async def test_a_job_that_came_to_nothing_goes_on_when(change: str, n_starts: int) -> None:
    world = await run_job(restarts=SHORT_WAITS | {"maxStartsWithoutCheckpoint": 2})
    assert await end_all_starts(world, ENDS["75 without a word"]) == 2
    assert b'stepkeeper_starts_without_checkpoint{job="lm",namespace="default"} 2.0' in world.metrics.render()
    await play(world, f"{change}, phase Running, condition Suspended False/NotSuspended, starts {n_starts}")


@pytest.mark.parametrize("restart", ["", ", restart"])
@pytest.mark.parametrize("end", [ENDS["75 without a word"], fail_behind_a_peer], ids=["saves", "failures"])
async def test_starts_that_end_at_once_wait_ever_longer_and_the_pods_are_not_there_meanwhile(
    end: Callable[[World], None], restart: str
) -> None:
    waits = {"backoff": {"initialSeconds": 100, "maxSeconds": 300}, "maxFailures": 50}
    world, begins = await run_job(restarts=waits), []
    for _ in range(5):
        begins.append(world.status.attempts[-1].start)
        end(world)
        await play(world, f"look, run 3{restart}")
        while world.phase() is not Phase.RUNNING:
            if world.status.next_start_time is not None:
                await play(world, "phase Restarting")
            await world.run_until_settled(rounds=1)
    spans = [later - earlier for earlier, later in itertools.pairwise(begins)]
    least = (100, 200, 300, 300) if end is fail_behind_a_peer else (0, 100, 200, 300)  # one save is bad luck
    for span, wait in zip(spans, least, strict=True):
        assert wait <= span < wait + 30
    await play(world, "jobsets 1")  # JobSet has restarted each in place


async def test_a_job_that_waits_has_no_pods_and_says_until_when() -> None:
    world = await run_job(restarts={"backoff": {"initialSeconds": 600, "maxSeconds": 600}})
    await play(world, "end 75, run 20, end 75, run 20, phase Restarting, pods 0, rests")
    await play(world, "condition Suspended False/NotSuspended, message Running status.nextStartTime")


AWAY: Final = termination_message(1, cause="StorageUnavailable", error="TransientStorageError: no answer")


async def test_storage_that_is_away_costs_no_failure_and_is_waited_for_ever_longer() -> None:
    world = await run_job(restarts={"maxFailures": 0, "backoff": {"initialSeconds": 100, "maxSeconds": 300}})
    for wait_s in (100, 200, 300, 300):
        world.now += 1200  # as long as a trainer waits
        for pod in world.pods:
            world.controllers.end_pod(pod, 1, message=AWAY)
        await world.reconcile()
        ended_at = world.now
        while world.causes[-1] is not None:
            await world.run_until_settled(rounds=1)
        assert wait_s <= world.status.attempts[-1].start - ended_at < wait_s + 30
        await play(world, "run 3, phase Running")
    assert world.causes == ["StorageUnavailable"] * 4 + [None]
    await play(world, "costs StorageUnavailable=4/0")
    assert "no answer" in (world.status.attempts[0].message or "")


@pytest.mark.parametrize(("other", "cause"), [("fail 1 1", "StorageUnavailable"), ("lose n2", "NodeFailure")])
async def test_what_other_ranks_fail_with_while_storage_is_away_is_no_failure_either(
    other: str, cause: str
) -> None:
    world = await play(await run_job(restarts={"maxFailures": 0}), f"{other}, wait 1")
    world.controllers.end_pod(world.pods[0], 1, message=AWAY)
    await world.run_until_settled(rounds=3)
    assert world.causes[0] == cause
