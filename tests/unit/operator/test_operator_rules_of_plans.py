"""Test the rules that plan what happens to the JobSet next, each by itself."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.facts import ON_MACHINES, make_job, make_jobset, make_machines
from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_history as history
from fake_cluster.facts import make_observed as seen
from fake_cluster.facts import make_unedited_jobset as jobset
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    Attempt,
    Bookkeeping,
    RestartsStatus,
)
from stepkeeper_operator.build import machines_hash, template_hash
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.decision import CreateJobSet, DeleteJobSet, SetSuspend
from stepkeeper_operator.facts import Pod
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempts import NOT_ALLOWED
from stepkeeper_operator.policy.history import Finding, JobHistory, Verdict
from stepkeeper_operator.policy.planning import judgement
from stepkeeper_operator.policy.planning.next_step import find_change, plan_next, plan_without_jobset
from stepkeeper_operator.policy.planning.plan import BACKING_OFF, Plan, set_suspend, stop_jobset
from stepkeeper_operator.settings import OperatorSettings

NOW: Final = 1000.0


SETTINGS: Final = OperatorSettings(identity="operator-1")


RUNNING: Final = Attempt(number=1, start=900)


FAILED: Final = Attempt(number=1, start=900, end=990, cause="ApplicationError", message="exit 1")


EVICTED: Final = Attempt(number=1, start=900, end=990, cause="Eviction", message="drained")


DONE: Final = Attempt(number=1, start=900, end=990, message="every pod exited 0")


FENCED: Final = Attempt(number=1, start=900, end=990, cause="Fenced", message="another claim")


JOB: Final = make_job()


def plan(known: JobHistory, observed: Observed, job: CheckpointedTrainingJob = JOB) -> Plan:
    return plan_next(job, observed, known, settings=SETTINGS, now=NOW)


def reason_of_end(
    known: JobHistory, job: CheckpointedTrainingJob = JOB, *, restarted: bool = False
) -> str | None:
    end = judgement.judge_last_end(job, known, restarted=restarted)
    return None if end is None else end.reason


def test_the_newest_end_is_judged_by_its_cause_and_what_is_left() -> None:
    none_left = make_job(restarts={"maxFailures": 1, "maxDisruptions": 1})
    assert reason_of_end(history(DONE), none_left) is None
    assert reason_of_end(history(FENCED)) == "RootOwnedByAnother"
    fatal = Finding(cause="ApplicationError", message="42", verdict=Verdict.FATAL)
    assert reason_of_end(history(FAILED, finding=fatal)) == "FatalExitCode"
    assert reason_of_end(history(FAILED, failures=1), none_left) == "MaxFailuresReached"
    assert reason_of_end(history(FAILED, failures=1), none_left, restarted=True) is None
    assert reason_of_end(history(EVICTED, evictions=1), none_left) == "MaxDisruptionsReached"
    assert reason_of_end(history(FAILED)) is None


def recorded(*known: Attempt, max_failures: int = 3) -> CheckpointedTrainingJob:
    attempts = [each.model_dump(mode="json", by_alias=True) for each in known]
    return make_job(status={"attempts": attempts}, restarts={"maxFailures": max_failures})


def test_an_end_is_recorded_once_the_status_has_its_cause_and_the_attempt_after_it() -> None:
    after = history(FAILED, Attempt(number=2, start=995))
    assert judgement.has_unrecorded_end(JOB, after)
    assert judgement.has_unrecorded_end(recorded(FAILED), after)
    assert not judgement.has_unrecorded_end(recorded(*after.attempts), after)
    assert judgement.has_unrecorded_end(recorded(EVICTED, after.attempts[1]), after)
    guess = FAILED.model_copy(
        update={"message": "it ended unseen; JobSet counted a failure of the application"}
    )
    assert judgement.has_unrecorded_end(recorded(guess, after.attempts[1]), after)


def test_an_end_whose_cause_is_recorded_is_judged_by_no_lower_budget() -> None:
    running = Attempt(number=2, start=995)
    after = history(FAILED, running, failures=2)
    assert reason_of_end(after, recorded(FAILED, max_failures=1), restarted=True) == "MaxFailuresReached"
    assert (
        reason_of_end(after, recorded(EVICTED, running, max_failures=1), restarted=True)
        == "MaxFailuresReached"
    )
    assert reason_of_end(after, recorded(FAILED, running, max_failures=1), restarted=True) is None
    fatal = Finding(cause="ApplicationError", message="42", verdict=Verdict.FATAL)
    told = history(FAILED, running, finding=fatal)
    assert reason_of_end(told, recorded(FAILED, running), restarted=True) == "FatalExitCode"


@pytest.mark.parametrize(
    ("finding", "off_machines", "on_machines"),
    [
        (None, False, False),
        (Finding(cause="Requested", message="?", explained=False), True, True),
        (Finding(cause="ApplicationError", message="exit 1"), False, True),
        (
            Finding(cause="ApplicationError", message="(OOMKilled: it used more memory than its limit)"),
            False,
            False,
        ),
        (Finding(cause="Eviction", message="drained"), False, False),
        (
            Finding(cause="ApplicationError", message="42", verdict=Verdict.FATAL, explained=False),
            False,
            False,
        ),
    ],
    ids=["nothing found", "a guess", "a failure", "its own limit", "an eviction", "a fatal code"],
)
def test_a_cause_can_still_change_that_is(
    finding: Finding | None, *, off_machines: bool, on_machines: bool
) -> None:
    known = history(FAILED, finding=finding)
    assert judgement.is_provisional(JOB, Observed(), known) is off_machines
    assert judgement.is_provisional(make_job(**ON_MACHINES), Observed(), known) is on_machines


TOLD: Final = ended(0, at=995.0, deadline=1020.0)


@pytest.mark.parametrize(
    ("attempt", "pods", "complete"),
    [
        (DONE, (), True),
        (EVICTED, (), False),
        (EVICTED, (ended(0),), True),
        (EVICTED, (TOLD,), False),
        (EVICTED.model_copy(update={"to_step": 999}), (ended(0),), False),
        (EVICTED.model_copy(update={"to_step": 1000}), (TOLD,), True),
    ],
    ids=[
        "nobody told it to stop",
        "nobody saw its pods",
        "its pods were done",
        "a program was told to stop",
        "steps are left",
        "no steps are left",
    ],
)
def test_pods_that_all_exited_0_are_complete_unless(
    attempt: Attempt, pods: tuple[Pod, ...], *, complete: bool
) -> None:
    observed = seen(*pods) if pods else Observed()
    of = jobset(completed=True)
    found = judgement.plan_after_completion(JOB, observed, of, Plan(history=history(attempt), job_set=None))
    assert (found.end is not None) is complete
    assert found.actions == (() if complete else (DeleteJobSet(jobset=of),))


def test_forgotten_pods_are_not_complete() -> None:
    found = judgement.plan_after_completion(
        JOB, seen(), jobset(), Plan(history=history(EVICTED), job_set=None)
    )
    assert found.end is None


def after_failure(known: JobHistory, now: float = NOW, **restarts: Any) -> Plan:
    return judgement.plan_after_failure(
        make_job(restarts=restarts),
        Observed(),
        jobset(failure_reason="Failed"),
        Plan(history=known, job_set=None),
        settings=SETTINGS,
        now=now,
    )


def test_a_failed_jobset_ends_the_job_once_its_cause_is_known_for_good() -> None:
    guess = history(FAILED, finding=Finding(cause="ApplicationError", message="?", explained=False))
    known = history(FAILED, finding=Finding(cause="ApplicationError", message="exit 1"))
    assert after_failure(known, maxFailures=0).end is not None
    awaited = after_failure(guess, maxFailures=0)
    assert (awaited.end, awaited.look_again_s) == (None, FAILED.end + 120 - NOW if FAILED.end else None)
    assert after_failure(guess, now=990 + 120, maxFailures=0).end is not None


def test_a_failed_jobset_is_replaced_after_its_back_off() -> None:
    backoff = {"initialSeconds": 60, "maxSeconds": 60}
    waiting = after_failure(history(FAILED), backoff=backoff)
    assert (waiting.actions, waiting.waiting, waiting.look_again_s) == ((), BACKING_OFF, 50)
    assert waiting.history.bookkeeping.not_before == 1050
    assert len(after_failure(history(FAILED), now=1051.0, backoff=backoff).actions) == 1


OTHER_QUEUE: Final[dict[str, Any]] = {"kueue.x-k8s.io/queue-name": "other"}


def test_an_edit_replaces_the_jobset() -> None:
    other = jobset(template_hash="another")
    assert find_change(JOB, jobset(), Observed(), history(RUNNING)) is None
    assert find_change(JOB, other, Observed(), history(RUNNING))
    assert find_change(JOB, other, Observed(held=True), history(RUNNING)) is None


def test_another_queue_replaces_a_jobset_that_is_suspended_and_idle() -> None:
    moved = make_job(labels=OTHER_QUEUE)
    idle = jobset(moved, suspended=True)
    assert find_change(moved, idle, Observed(), history(EVICTED))
    assert find_change(moved, idle, Observed(), history(RUNNING)) is None, "it runs down"
    assert find_change(moved, jobset(moved), Observed(), history(EVICTED)) is None, "it runs"
    assert find_change(JOB, jobset(suspended=True), Observed(), history(EVICTED)) is None


def test_other_machines_replace_a_suspended_jobset_once_they_are_ready() -> None:
    job, machines = make_job(**ON_MACHINES), make_machines()
    of = make_jobset(suspended=True, template_hash=template_hash(job, machines), machines_hash="others")
    for change, changed in (
        ({}, True),
        ({"suspended": False}, False),
        ({"machines_hash": machines_hash(machines)}, False),
    ):
        found = find_change(job, replace(of, **change), Observed(machines=machines), history(EVICTED))
        assert (found is not None) is changed
    unready = Observed(machines=replace(machines, joined=False))
    assert find_change(job, of, unready, history(EVICTED)) is None
    assert find_change(job, replace(of, template_hash="another"), Observed(), history(EVICTED)) is None


BACKOFF: Final[dict[str, Any]] = {"initialSeconds": 60, "maxSeconds": 60}


FEW: Final = make_job(restarts={"maxStartsWithoutCheckpoint": 2})


def make(known: JobHistory, job: CheckpointedTrainingJob = JOB, **observed: Any) -> Plan:
    return plan_without_jobset(job, Observed(**observed), known, settings=SETTINGS, now=NOW)


def max_restarts(found: Plan) -> int:
    (action,) = found.actions
    assert isinstance(action, CreateJobSet)
    return int(action.manifest["spec"]["failurePolicy"]["maxRestarts"])


MADE: Final[dict[str, Any]] = {"resources": {"jobSet": {"name": "lm", "uid": "s"}}}


def test_a_jobset_gets_a_number_of_its_own() -> None:
    first = make(JobHistory(attempts=(), restarts=RestartsStatus(), bookkeeping=Bookkeeping()))
    assert first.history.bookkeeping.job_sets == 1
    known = history(EVICTED, restarts_seen=3, counted_restarts_seen=2, resumed_at=950)
    assert make(known).history.bookkeeping == known.bookkeeping, "the number was not used yet"
    anew = Bookkeeping(job_sets=2)
    assert make(known, make_job(status=MADE)).history.bookkeeping == anew
    evidence = (AttemptEvidence(ordinal=(0, 2)),)
    assert make(known, evidence=evidence).history.bookkeeping == anew


def test_a_jobset_may_restart_as_often_as_failures_are_left() -> None:
    job = make_job(restarts={"maxFailures": 2, "backoff": {"initialSeconds": 0}})
    assert max_restarts(make(history(EVICTED), job)) == 2
    assert max_restarts(make(history(EVICTED, failures=1), job)) == 1
    assert max_restarts(make(history(FAILED, failures=1), job)) == 0, "this JobSet is itself a restart"
    assert max_restarts(make(history(EVICTED, failures=5), job)) == 0
    ended_job = make(history(FAILED, failures=2), job)
    assert (ended_job.actions, ended_job.end is not None) == ((), True)


def test_no_jobset_is_made_while_something_is_waited_for() -> None:
    waiting = make(history(EVICTED), make_job(suspend=True))
    assert (waiting.actions, waiting.waiting) == ((), "it is suspended")


def test_completion_comes_before_edits_and_deletion() -> None:
    edited = jobset(completed=True, template_hash="another")
    assert plan(history(DONE), seen(jobset=edited)).end is not None
    assert plan(history(DONE), seen(jobset=replace(edited, deleting=True))).end is not None
    gone = plan(history(EVICTED), seen(jobset=jobset(completed=True, deleting=True)))
    assert (gone.end, gone.actions, gone.waiting) == (None, (), "the old JobSet's pods are still stopping")


def test_an_edit_ends_the_attempt_and_deletes_the_jobset_once() -> None:
    edited = plan(history(RUNNING), seen(jobset=jobset(template_hash="another")))
    assert len(edited.actions) == 1
    assert not edited.history.is_running
    assert plan(history(RUNNING), seen(jobset=jobset(template_hash="another", deleting=True))).actions == ()


def test_a_failed_jobset_is_followed_up() -> None:
    found = plan(history(EVICTED), seen(jobset=jobset(failure_reason="ReachedMaxRestarts")))
    assert found.waiting == "its JobSet is being replaced"


NONE_LEFT: Final[dict[str, Any]] = {"restarts": {"maxFailures": 0}}


def test_jobset_acts_first_on_an_end_that_is_not_final() -> None:
    job = make_job(**NONE_LEFT)
    fatal = Finding(cause="ApplicationError", message="42", verdict=Verdict.FATAL)
    usual = Finding(cause="ApplicationError", message="exit 1")
    assert plan(history(FAILED, finding=usual), seen(ended(1)), job).end is None
    assert plan(history(FAILED, finding=fatal), seen(ended(1)), job).end is not None


def test_a_restart_that_jobset_began_ends_with_the_job_unless_it_was_allowed() -> None:
    begun = history(FAILED, Attempt(number=2, start=995), failures=1)
    job = make_job(**NONE_LEFT)
    found = plan(begun, seen(), job)
    assert found.end is not None
    assert found.history.attempts[-1].message == NOT_ALLOWED
    assert plan(begun, seen(), make_job(restarts={"maxFailures": 1})).end is None
    status = {"attempts": [each.model_dump(mode="json", by_alias=True) for each in begun.attempts]}
    recorded = make_job(status=status, **NONE_LEFT)
    assert plan(begun, seen(), recorded).end is None, "an edit of the budget ends nothing"
    fatal = replace(begun, finding=Finding(cause="ApplicationError", message="42", verdict=Verdict.FATAL))
    assert plan(fatal, seen(), job).end is not None
    assert plan(fatal, seen(), recorded).end is None, "nor does an edit of the fatal codes"


def test_more_starts_than_are_allowed_are_looked_at_again_when_reports_are_due() -> None:
    over = history(RUNNING, starts_without_checkpoint=3)
    assert plan(over, seen(operator_started_at=NOW - 20), FEW).look_again_s == 40
    assert plan(over, seen(), FEW).actions == (SetSuspend(jobset=jobset(), suspend=True),)


def on_machines(
    known: JobHistory, *, held: bool = False, of: dict[str, Any] | None = None, **more: Any
) -> Plan:
    job, machines = make_job(**ON_MACHINES), make_machines(**more)
    base = {"template_hash": template_hash(job, machines), "machines_hash": machines_hash(machines)}
    return plan(known, seen(jobset=make_jobset(**(base | (of or {}))), machines=machines, held=held), job)


def test_lost_machines_suspend_what_runs_and_hosts_that_left_only_what_starts() -> None:
    assert on_machines(history(RUNNING)).actions == ()
    lost = on_machines(history(RUNNING), active=False)
    assert [type(action) for action in lost.actions] == [SetSuspend]
    assert "QueuedResource tpu" in (lost.waiting or "")
    left = on_machines(history(RUNNING), joined=False)
    assert (left.actions, left.waiting) == ((), None)
    starting = on_machines(history(EVICTED), joined=False, of={"suspend": True, "suspended": True})
    assert (starting.actions, "to join" in (starting.waiting or "")) == ((), True)
    back = on_machines(history(EVICTED), of={"suspend": True, "suspended": True})
    assert [type(action) for action in back.actions] == [SetSuspend]


def test_what_is_held_is_neither_resumed_nor_kept_in_a_back_off() -> None:
    idle = jobset(suspend=True, suspended=True)
    resume = (SetSuspend(jobset=idle, suspend=False),)
    assert plan(history(EVICTED), seen(jobset=idle)).actions == resume
    assert plan(history(EVICTED), seen(jobset=idle, held=True)).actions == ()
    backed_off = history(EVICTED, not_before=980, starts_without_checkpoint=3)
    short = make_job(restarts={"backoff": {"initialSeconds": 46, "maxSeconds": 1000}})
    assert plan(backed_off, seen(jobset=idle, held=True), short).actions == resume
    assert plan(history(RUNNING), seen(held=True), make_job(suspend=True)).actions == (
        SetSuspend(jobset=jobset(), suspend=True),
    )


def test_a_back_off_suspends_what_jobset_would_restart_at_once() -> None:
    job = make_job(restarts={"backoff": BACKOFF})
    found = plan(history(FAILED), seen(ended(1), ended(75, 1)), job)
    assert found.actions == (SetSuspend(jobset=jobset(), suspend=True),)


QUEUED: Final[dict[str, Any]] = {"queue_labels": {"kueue.x-k8s.io/queue-name": "default"}}


def test_a_queued_jobset_is_kueues_until_the_job_has_to_leave() -> None:
    of = jobset(**QUEUED)
    assert plan(history(EVICTED), seen(jobset=replace(of, suspend=True, suspended=True))).actions == ()
    assert plan(history(RUNNING), seen(jobset=of), make_job(suspend=True)).actions == (
        DeleteJobSet(jobset=of),
    )
    left = on_machines(history(RUNNING), active=False, of=QUEUED)
    assert [type(action) for action in left.actions] == [DeleteJobSet]
    assert on_machines(history(RUNNING), joined=False, of=QUEUED).actions == ()


def test_a_jobset_is_stopped_once_and_kept_where_it_ended_by_itself() -> None:
    assert stop_jobset(None, queued=False) == ()
    assert stop_jobset(jobset(completed=True), queued=False) == ()
    assert stop_jobset(jobset(deleting=True), queued=False) == ()
    assert stop_jobset(jobset(suspended=True), queued=False) == (DeleteJobSet(jobset=jobset(suspended=True)),)
    assert stop_jobset(jobset(), queued=True) == (DeleteJobSet(jobset=jobset()),)
    assert stop_jobset(jobset(), queued=False) == (SetSuspend(jobset=jobset(), suspend=True),)
    assert set_suspend(jobset(), suspend=False) == ()
