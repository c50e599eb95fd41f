"""Test the rules of attempts, evidence, budgets and resumptions by the values that they judge, each by itself."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_failed_job as failed_job
from fake_cluster.facts import make_jobset as jobset
from fake_cluster.facts import make_pod as pod
from fake_cluster.kubelets import training_report
from stepkeeper.contract import Cause, Termination
from stepkeeper_operator.api.v1alpha1.trainingjob import BackoffSpec, RestartsSpec
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    MAX_ATTEMPTS,
    Attempt,
    Bookkeeping,
    CauseCount,
    RestartsStatus,
)
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts import BatchJob, JobSet, Pod
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy import attempt_evidence, attempts, budgets
from stepkeeper_operator.policy.attempts import open_if_started
from stepkeeper_operator.policy.history import Finding, JobHistory

NOW: Final = 1000.0
ENDED: Final = Attempt(number=1, start=100, end=500, cause="Eviction", message="evicted")
RUNNING: Final = Attempt(number=1, start=100)


def history(*known: Attempt, restarts: RestartsStatus | None = None, **more: Any) -> JobHistory:
    bookkeeping = Bookkeeping(**({"job_sets": 1, "started": True} | more))
    return JobHistory(attempts=known, restarts=restarts or RestartsStatus(), bookkeeping=bookkeeping)


def seen(*pods: Pod, jobs: tuple[BatchJob, ...] = (), present: tuple[Pod, ...] | None = None) -> Observed:
    evidence = AttemptEvidence(ordinal=(0, 0), pods=pods, failed_batch_jobs=jobs)
    return Observed(evidence=(evidence,), pods=pods if present is None else present, jobset=jobset())


def counted(**by_cause: tuple[int, int]) -> RestartsStatus:
    entries = tuple(
        CauseCount(cause=cause, count=count, counted_towards_limit=towards)
        for cause, (count, towards) in by_cause.items()
    )
    return RestartsStatus(total=sum(entry.count for entry in entries), by_cause=entries)


DISRUPTIONS: Final = (
    "SpotPreemption",
    "QueuePreemption",
    "SchedulerPreemption",
    "Maintenance",
    "NodeFailure",
    "Eviction",
    "Disruption",
)


@pytest.mark.parametrize("cause", DISRUPTIONS)
def test_each_disruption_uses_up_max_disruptions_and_nothing_where_there_is_no_limit(cause: str) -> None:
    spec, known = RestartsSpec(max_disruptions=1), counted(**{cause: (1, 0)})
    assert budgets.count_disruptions(spec, known).by_cause[0].counted_towards_limit == 1
    assert budgets.count_disruptions(RestartsSpec(), known).by_cause[0].counted_towards_limit == 0
    assert budgets.explain_exhausted_budget(spec, known, cause, restarted=False)
    assert budgets.explain_exhausted_budget(spec, known, cause, restarted=True) is None
    assert budgets.explain_exhausted_budget(RestartsSpec(), known, cause, restarted=False) is None


def test_other_ends_use_up_no_disruptions_and_are_not_limited_by_them() -> None:
    spec = RestartsSpec(max_disruptions=1)
    assert (
        budgets.explain_exhausted_budget(spec, counted(Requested=(5, 0)), "Eviction", restarted=False) is None
    )
    assert (
        budgets.explain_exhausted_budget(spec, counted(Eviction=(5, 5)), "Requested", restarted=False) is None
    )
    assert budgets.count_disruptions(spec, counted(Requested=(5, 0))) == counted(Requested=(5, 0))


def test_disruptions_are_no_failures_whatever_is_counted_of_them() -> None:
    known = counted(ApplicationError=(3, 1), Eviction=(2, 2))
    assert budgets.count_failures(known) == 1
    assert budgets.reset_failures(known) == counted(ApplicationError=(3, 0), Eviction=(2, 2))
    assert budgets.add_restarts(known, "Eviction", 1) == counted(ApplicationError=(3, 1), Eviction=(3, 2))
    assert budgets.add_restarts(counted(Eviction=(1, 0)), "Eviction", -1) == RestartsStatus()
    failure = Cause.APPLICATION_ERROR
    assert budgets.move_restart(known, source=failure, target=failure) == known
    refilled = counted(ApplicationError=(1, 0))
    assert budgets.move_restart(refilled, source=failure, target=failure) == refilled, (
        "a commit came after it"
    )


def test_a_restart_that_has_begun_is_not_counted_against_itself() -> None:
    spec, known = RestartsSpec(max_failures=1), counted(ApplicationError=(1, 1))
    assert budgets.explain_exhausted_budget(spec, known, "ApplicationError", restarted=True) is None
    assert budgets.explain_exhausted_budget(spec, known, "ApplicationError", restarted=False)


def test_a_back_off_doubles_up_to_its_limit() -> None:
    spec = BackoffSpec(initial_seconds=10, max_seconds=60)
    assert [budgets.compute_backoff_s(spec, n) for n in (0, 1, 2, 3, 99)] == [10, 20, 40, 60, 60]


def found_uids(since: int | None, *pods: Pod, jobs: tuple[BatchJob, ...] = ()) -> set[str]:
    evidence = attempt_evidence.find_attempt_evidence(
        history(RUNNING, resumed_at=since), seen(*pods, jobs=jobs)
    )
    assert evidence is not None
    return {each.uid for each in evidence.pods} | {each.uid for each in evidence.failed_batch_jobs}


NEW: Final[dict[str, Any]] = {"uid": "new", "created_at": 300.0}


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (ended(0, disruption="EvictionByEvictionAPI"), False),
        (ended(1), True),
        (pod(deadline=330.0), True),
        (ended(143, deadline=330.0), True),
    ],
    ids=["exited 0", "failed", "still stops", "was killed"],
)
def test_a_pod_whose_place_another_took_is_evidence_unless_it(before: Pod, *, kept: bool) -> None:
    assert found_uids(None, before, pod(**NEW), pod(1)) == {"new", "p1"} | ({"p0"} if kept else set())


@pytest.mark.parametrize(
    ("other", "own"),
    [
        (pod(1, created_at=200.0), True),
        (ended(1, 1, created_at=200.0, at=201.0), True),
        (pod(1, created_at=200.0, deadline=200.0), True),
        (pod(1), True),
        (pod(1, deadline=260.0), True),
        (pod(1, deadline=220.0), False),
        (ended(1, 1, at=250.0), True),
        (ended(1, 1, at=150.0), False),
        (ended(1, 1, at=None), False),
    ],
    ids=[
        "was made later",
        "was made later and has ended",
        "was made later and was told to end",
        "runs on",
        "was told to end later",
        "was told to end before",
        "ended later",
        "ended before",
        "ended nobody knows when",
    ],
)
def test_a_pod_is_of_the_attempt_after_a_resumption_if_it(other: Pod, *, own: bool) -> None:
    assert attempt_evidence.is_of_attempt(other, 200) is own
    assert found_uids(200, pod(**NEW), other) == {"new"} | ({"p1"} if own else set())


def test_of_two_pods_that_were_made_in_one_second_the_living_one_has_the_place() -> None:
    told, alive = pod(uid="told", deadline=130.0), pod(uid="alive")
    for pods in ((told, alive), (alive, told)):
        assert attempt_evidence.leave_out_replaced(pods, Observed(pods=pods)) == [alive]
        assert attempt_evidence.leave_out_replaced(pods, Observed()) == [alive], "as they were last seen"


def test_a_job_that_was_made_anew_since_has_not_failed() -> None:
    old, new = ended(1, owner_uid="old"), pod(created_at=300.0, uid="new", owner_uid="new")
    assert found_uids(None, old, new, jobs=(failed_job("old"),)) >= {"old", "new"}
    assert found_uids(200, old, new, jobs=(failed_job("old"),)) == {"new"}
    assert found_uids(200, new, jobs=(failed_job("new"),)) == {"new"}


def test_pods_whose_places_others_took_complete_nothing() -> None:
    told = ended(143, deadline=430.0), ended(0, 1, deadline=430.0)
    done = [ended(0, rank, f"new{rank}", created_at=500.0, at=600.0) for rank in (0, 1)]
    found = attempt_evidence.find_last_evidence(history(RUNNING), seen(*told, *done))
    assert found is not None
    assert set(found.pods) == set(done)


def report(*, ordinal: tuple[int, int] = (0, 0), at: float = 600.0) -> LastReport:
    return LastReport(report=training_report(7, 70), ordinal=ordinal, received_at=at, pod_uid="p0")


def test_a_report_is_of_the_last_attempt_by_its_ordinal_and_its_time() -> None:
    for last, own in ((report(), True), (report(ordinal=(0, 1)), False), (report(at=99.0), False)):
        found = attempt_evidence.find_current_report(Observed(report=last), history(RUNNING, resumed_at=100))
        assert (found is last) is own
    assert (
        attempt_evidence.find_current_report(Observed(report=report(at=99.0)), history(RUNNING)) is not None
    )


@pytest.mark.parametrize(
    ("pods", "n_done"),
    [
        ((ended(0), pod(1)), 1),
        ((ended(0, created_at=50.0, uid="old"), pod(), pod(1)), 0),
        ((ended(0, termination=Termination(code=75)), pod(1)), 0),
        ((ended(0, deadline=430.0), pod(1)), 0),
        ((ended(1), pod(1)), 0),
    ],
    ids=["exited 0", "was replaced", "said that it had saved", "was told to stop", "failed"],
)
def test_a_pod_is_done_that(pods: tuple[Pod, ...], n_done: int) -> None:
    assert attempt_evidence.find_done(seen(*pods), history(RUNNING))[0] == n_done


def new_pods(last: Attempt, *pods: Pod, **more: Any) -> int | None:
    return attempt_evidence.find_new_pods(history(last), seen(*pods, **more))


def test_pods_that_took_the_places_of_others_begin_an_attempt_when_they_were_made() -> None:
    old, new = ended(143, deadline=430.0), pod(created_at=520.0, uid="new")
    assert new_pods(ENDED, old, new, pod(1)) == 520
    assert new_pods(ENDED, new, pod(1)) == 500, "the old one was never seen"
    assert new_pods(ENDED, old, new, ended(0, 1)) == 520, "the other one is done"
    assert new_pods(ENDED, old, new, ended(0, 1), present=(new,)) == 520, "it is done and gone"


def test_no_attempt_begins_with() -> None:
    old, new = ended(143, deadline=430.0), pod(created_at=520.0, uid="new")
    assert new_pods(RUNNING, old, new, pod(1)) is None, "pods of an attempt that runs"
    assert new_pods(ENDED, old, new, ended(1, 1)) is None, "pods of which one has failed"
    assert new_pods(ENDED, old, new, pod(1, deadline=530.0)) is None, "pods of which one was told to end"
    assert new_pods(ENDED, ended(0), ended(0, 1)) is None, "pods that are all done"
    assert new_pods(ENDED, old, new, pod(1), present=(new,)) is None, "pods of which one is gone unseen"
    assert new_pods(ENDED, old, new, pod(1), jobs=(failed_job(),)) is None, "a Job that JobSet has to act on"


def test_an_attempt_begins_with_its_first_pod() -> None:
    observed = seen(pod(created_at=120.0), pod(1, created_at=110.0))
    assert attempt_evidence.find_start(history(), observed, now=NOW) == 110.0
    assert attempt_evidence.find_start(history(), Observed(), now=NOW) == NOW


def test_an_attempt_runs_down_while_a_pod_of_its_own_has_not_ended() -> None:
    for observed, down in (
        (seen(pod(deadline=530.0)), True),
        (seen(ended(1)), False),
        (seen(ended(1), present=(pod(uid="another attempt's"),)), False),
    ):
        assert attempt_evidence.runs_down(history(RUNNING), observed) is down


@pytest.mark.parametrize(
    ("pods", "jobs", "failure"),
    [
        ((ended(1),), (), True),
        ((pod(),), (), None),
        ((ended(1), ended(75, 1)), (), False),
        ((ended(1, disruption="EvictionByEvictionAPI"),), (), False),
        ((ended(137, hang=True),), (), False),
        ((ended(75),), (failed_job(),), True),
        ((ended(1),), (failed_job(message="pod p0 has condition DisruptionTarget"),), False),
        ((ended(1),), (failed_job(message="failed with exit code 75 matching"),), False),
        ((ended(1),), (failed_job(message="failed with exit code 1 matching"),), True),
    ],
    ids=[
        "a pod that failed",
        "no end",
        "one that saved",
        "a disruption",
        "a hang",
        "a Job that says nothing of a save",
        "a Job that tells of a condition",
        "a Job that tells of a save",
        "a Job that tells of another code",
    ],
)
def test_jobset_counts_as_a_failure(
    pods: tuple[Pod, ...], jobs: tuple[BatchJob, ...], *, failure: bool | None
) -> None:
    evidence = AttemptEvidence(ordinal=(0, 0), pods=pods, failed_batch_jobs=jobs)
    assert attempt_evidence.counts_as_failure(evidence) is failure


def test_an_attempt_opens_after_the_last_one_with_what_it_was_started_from() -> None:
    first = replace(
        history(ENDED, not_before=900, starts_without_checkpoint=2), finding=Finding(cause="", message="")
    )
    opened = attempts.open_attempt(first, seen(pod()), now=NOW)
    assert opened.attempts == (ENDED, Attempt(number=2, start=500)), "its pod was made before the last end"
    assert opened.restarts == counted(Eviction=(1, 0))
    assert opened.finding == first.finding, "JobSet may have begun it though the end is final"
    assert opened.bookkeeping == Bookkeeping(
        job_sets=1, started=True, starts_without_checkpoint=3, started_template="t1"
    )


def test_only_so_many_attempts_are_kept_and_messages_are_cut() -> None:
    known = tuple(Attempt(number=n, start=n, end=n, cause="Eviction") for n in range(1, MAX_ATTEMPTS + 1))
    opened = attempts.open_attempt(history(*known), Observed(), now=NOW)
    assert [attempt.number for attempt in opened.attempts] == list(range(2, MAX_ATTEMPTS + 2))
    closed = attempts.close_attempt(opened, None, Finding(cause="Eviction", message="é" * 5000), now=NOW)
    assert closed.attempts[-1].message == "é" * attempts.MESSAGE_LIMIT


@pytest.mark.parametrize(
    ("pods", "end"),
    [
        ((ended(0, at=200.0), ended(1, 1, at=400.0), ended(143, 2, at=401.0)), 400),
        ((ended(0, at=200.0), ended(0, 1, at=400.0)), 400),
        ((ended(0, at=200.0), pod(1)), 1000),
        ((ended(1, at=400.0, phase="Running"),), 1000),
        ((ended(1, at=2000.0),), 1000),
        ((ended(1, at=50.0),), 100),
        ((ended(0, at=400.0, termination=Termination(code=1)), pod(1)), 400),
        ((ended(1, at=None),), 1000),
        ((), 1000),
    ],
    ids=[
        "its first failure",
        "its last pod",
        "now while a pod runs",
        "now while a container runs on beside its trainer",
        "now by a clock that is ahead",
        "its start by a clock that is behind",
        "a failure that a shell hides",
        "now where no time is told",
        "now where nothing was seen",
    ],
)
def test_an_attempt_ends_with(pods: tuple[Pod, ...], end: int) -> None:
    evidence = AttemptEvidence(ordinal=(0, 0), pods=pods)
    closed = attempts.close_attempt(history(RUNNING), evidence, Finding(cause="", message=""), now=NOW)
    assert closed.attempts[-1].end == end


def test_what_somebody_asks_for_ends_only_an_attempt_that_runs() -> None:
    assert attempts.close_as_requested(history(ENDED), Observed(), attempts.DELETED, now=NOW) == history(
        ENDED
    )
    closed = attempts.close_as_requested(history(RUNNING), Observed(), attempts.DELETED, now=NOW)
    assert (closed.attempts[-1].cause, closed.attempts[-1].message) == ("Requested", attempts.DELETED)


def test_an_end_for_want_of_machines_is_a_suspension_and_needs_no_evidence() -> None:
    closed = attempts.close_displaced(history(RUNNING), Observed(), Cause.EVICTION, "no quota", now=NOW)
    message = closed.attempts[-1].message
    assert attempts.was_suspended(message)
    assert attempts.was_asked_for(message)
    assert attempts.was_suspended(attempts.SUSPENDED)
    for asked_for in (attempts.SUSPENDED, attempts.EDITED, attempts.DELETED, attempts.NOT_ALLOWED):
        assert attempts.was_asked_for(asked_for)
    assert not any(map(attempts.was_suspended, (None, "evicted", attempts.DELETED)))
    assert not any(map(attempts.was_asked_for, (None, "evicted")))


def test_an_attempt_that_never_ran_takes_its_restart_and_its_start_back() -> None:
    known = history(
        ENDED, Attempt(number=2, start=600), restarts=counted(Eviction=(1, 0)), starts_without_checkpoint=2
    )
    taken_back = attempts.withdraw_attempt(known)
    assert taken_back == history(ENDED, starts_without_checkpoint=1)


def resumed(
    *known: Attempt, observed: Observed | None = None, of: JobSet | None = None, **more: Any
) -> JobHistory:
    return open_if_started(history(*known, **more), observed or Observed(), of or jobset(), now=NOW)


SUSPENDED: Final = ENDED.model_copy(update={"cause": "Requested", "message": attempts.SUSPENDED})


@pytest.mark.parametrize("state", ["deleting", "completed", "suspend", "suspended"])
def test_nothing_begins_in_a_jobset_that_is(state: str) -> None:
    assert resumed(SUSPENDED, of=jobset(**{state: True}), started=False).attempts == (SUSPENDED,)


def test_the_first_start_of_a_jobset_is_an_attempt() -> None:
    assert len(resumed(ENDED, started=False).attempts) == 2
    assert resumed(ENDED).attempts == (ENDED,), "JobSet restarts it"


def test_a_resumption_is_an_attempt_from_the_time_that_jobset_says() -> None:
    later = jobset(resumed_at=700.0)
    for known in ((SUSPENDED,), (ENDED,), ()):
        opened = resumed(*known, of=later)
        assert opened.bookkeeping.resumed_at == 700
        assert len(opened.attempts) == len(known) + 1
    assert resumed(SUSPENDED).bookkeeping.resumed_at == int(NOW), "JobSet doesn't say when"
    assert resumed(SUSPENDED, of=jobset(resumed_at=500.0)).bookkeeping.resumed_at == 500, "in the same second"
    assert resumed(ENDED, of=jobset(resumed_at=50.0)).attempts == (ENDED,), "that was long before"


def test_a_failed_job_is_restarted_before_a_resumption_counts() -> None:
    observed = seen(ended(1), jobs=(failed_job(),))
    assert resumed(ENDED, observed=observed, of=jobset(resumed_at=700.0)).attempts == (ENDED,)
