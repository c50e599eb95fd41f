"""Test the rules that turn what was observed into a history of attempts, each by itself."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_failed_job as failed_job
from fake_cluster.facts import make_history as history
from fake_cluster.facts import make_job, make_machines
from fake_cluster.facts import make_jobset as jobset
from fake_cluster.facts import make_pod as pod
from fake_cluster.kubelets import training_report
from stepkeeper.contract import CommitPoint, Termination
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt, Bookkeeping
from stepkeeper_operator.build import template_hash
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts import JobSet, Pod
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy.attempts import (
    DELETED,
    SUSPENDED,
    close_as_requested,
    was_asked_for,
    was_suspended,
)
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.history_update import update_history
from stepkeeper_operator.policy.restarts_in_place import came_too_late, record_restarts

NOW: Final = 1000.0
RUNNING: Final = Attempt(number=1, start=100)
FAILED: Final = Attempt(number=1, start=100, end=990, cause="ApplicationError", message="exit 1")
JOB: Final = make_job()
ON_MACHINES: Final[dict[str, Any]] = {
    "placement": {"tpu": {"accelerator": "v5p", "topology": "2x2x2", "queuedResourceName": "tpu"}}
}
LOST: Final = make_machines(active=False)


def evidence(restarts: int, *pods: Pod, **more: Any) -> AttemptEvidence:
    return AttemptEvidence(ordinal=(0, restarts), pods=pods, **more)


def record(
    known: JobHistory, *seen: AttemptEvidence, of: JobSet, job: CheckpointedTrainingJob = JOB, **more: Any
) -> JobHistory:
    return record_restarts(known, job, Observed(evidence=seen, jobset=of, **more), of, now=NOW)


def causes(known: JobHistory) -> list[str | None]:
    return [attempt.cause for attempt in known.attempts]


def test_a_restart_that_nobody_saw_ends_an_attempt_that_nobody_saw() -> None:
    found = record(history(started=False), of=jobset(restarts=1))
    assert causes(found) == ["Disruption", None]
    assert found.bookkeeping.restarts_seen == 1
    assert causes(record(history(RUNNING), of=jobset(restarts=1, rule="hang"))) == ["Hang", None]


def test_unseen_ends_are_failures_as_often_as_jobset_has_counted_some() -> None:
    counted = jobset(restarts=2, restarts_counted=1)
    assert causes(record(history(RUNNING), of=counted)) == ["ApplicationError", "Disruption", None]
    assert causes(record(history(FAILED), of=counted)) == ["ApplicationError", "Disruption", None]
    evicted = history(FAILED.model_copy(update={"cause": "Eviction"}))
    assert causes(record(evicted, of=counted)) == ["Eviction", "ApplicationError", None]
    known = history(RUNNING, restarts_seen=1, counted_restarts_seen=1)
    assert causes(record(known, of=counted)) == ["Disruption", None]
    seen = record(history(RUNNING), evidence(0, ended(1)), of=counted)
    assert causes(seen) == ["ApplicationError", "Disruption", None]
    assert seen.bookkeeping.counted_restarts_seen == 1
    job = evidence(0, failed_batch_jobs=(failed_job(),))
    told = record(history(RUNNING), job, of=jobset(restarts=1, restarts_counted=1))
    assert causes(told) == ["ApplicationError", None], "its Job told of it"


def test_an_unseen_end_is_the_start_of_the_next_attempt() -> None:
    found = record(
        history(RUNNING, resumed_at=150), evidence(1, pod(created_at=950.0)), of=jobset(restarts=1)
    )
    assert (found.attempts[0].end, found.attempts[1].start) == (950, 950)
    assert found.bookkeeping.resumed_at is None


def test_a_restart_begins_no_attempt_while_it_is_suspended_and_has_no_pods() -> None:
    held = jobset(restarts=1, suspend=True)
    assert record(history(FAILED), of=held).attempts == (FAILED,)
    assert len(record(history(FAILED), evidence(1, pod()), of=held).attempts) == 2


def late(
    *pods: Pod, attempt: Attempt = RUNNING, status: dict[str, Any] | None = None, **observed: Any
) -> bool:
    base: dict[str, Any] = {"evidence": (evidence(0, *pods),) if pods else (), "machines": LOST}
    seen, job = Observed(**(base | observed)), make_job(status=status, **ON_MACHINES)
    return came_too_late(history(attempt), job, seen, now=NOW)


def running_condition(status: str, at: str) -> dict[str, Any]:
    return {"conditions": [{"type": "Running", "status": status, "reason": "r", "lastTransitionTime": at}]}


def test_an_attempt_came_too_late_for_its_machines_unless_all_its_pods_have_run() -> None:
    assert late(pod())
    assert late(pod(), pod(1, started=False))
    assert not late(pod(), pod(1))
    assert not late(pod(), machines=make_machines())
    assert not late(attempt=RUNNING.model_copy(update={"to_step": 1}))
    assert not late(attempt=RUNNING.model_copy(update={"from_step": 1}))


def test_the_status_tells_whether_pods_have_run_that_nobody_has_seen() -> None:
    before, since = "1970-01-01T00:01:00Z", "1970-01-01T00:05:00Z"
    assert late()
    assert late(status=running_condition("False", before))
    assert not late(status=running_condition("False", since))
    assert not late(status=running_condition("True", before))


def test_a_restart_that_came_too_late_is_none() -> None:
    found = record(history(RUNNING), of=jobset(restarts=1), job=make_job(**ON_MACHINES), machines=LOST)
    assert causes(found) == [None]


def updated(
    *attempts: Attempt,
    pods: tuple[Pod, ...] = (),
    seen: dict[str, Any] | None = None,
    of: JobSet | None = None,
    commit: bool = False,
    known: dict[str, Any] | None = None,
    status: dict[str, Any] | None = None,
    **spec: Any,
) -> JobHistory:
    bookkeeping = Bookkeeping(**({"job_sets": 1, "started": True} | (known or {})))
    own: dict[str, Any] = {
        "attempts": [each.model_dump(mode="json", by_alias=True) for each in attempts],
        "bookkeeping": bookkeeping.model_dump(mode="json", by_alias=True),
    }
    job = make_job(status=own | (status or {}), **spec)
    base: dict[str, Any] = {"jobset": of or jobset(), "pods": pods, "evidence": (evidence(0, *pods),)}
    observed = Observed(**(base | (seen or {})))
    return update_history(job, observed, new_commit=commit, now=NOW, reattribution_s=120)


def last_end(known: JobHistory) -> tuple[str | None, str | None]:
    return known.attempts[-1].cause, known.attempts[-1].message


def test_a_commit_counts_starts_anew_but_for_those_that_nobody_saw() -> None:
    assert (
        updated(
            RUNNING, commit=True, known={"starts_without_checkpoint": 5}
        ).bookkeeping.starts_without_checkpoint
        == 0
    )
    unseen = updated(RUNNING, commit=True, of=jobset(restarts=2))
    assert unseen.bookkeeping.starts_without_checkpoint == 1
    assert updated(RUNNING, known={"starts_without_checkpoint": 5}).bookkeeping.starts_without_checkpoint == 5


def test_who_suspends_or_edits_has_looked_at_the_starts() -> None:
    many = {"starts_without_checkpoint": 5}
    assert updated(FAILED, suspend=True, known=many).bookkeeping.starts_without_checkpoint == 0
    edited = many | {"started_template": "another"}
    assert updated(FAILED, known=edited).bookkeeping.starts_without_checkpoint == 0
    same = many | {"started_template": template_hash(JOB)}
    assert updated(FAILED, known=same).bookkeeping.starts_without_checkpoint == 5


def test_a_commit_refills_failures_where_the_job_wants_it() -> None:
    status = {
        "restarts": {
            "total": 1,
            "byCause": [{"cause": "ApplicationError", "count": 1, "countedTowardsLimit": 1}],
        }
    }
    for choice, left in ((True, 0), (False, 1)):
        found = updated(RUNNING, commit=True, status=status, restarts={"resetOnNewCheckpoint": choice})
        assert found.restarts.by_cause[0].counted_towards_limit == left


def test_disruptions_count_towards_their_limit_where_the_job_has_one() -> None:
    status = {"restarts": {"total": 2, "byCause": [{"cause": "Eviction", "count": 2}]}}
    for limit, counted in (({}, 0), ({"maxDisruptions": 9}, 2)):
        found = updated(RUNNING, status=status, restarts=limit)
        assert found.restarts.by_cause[0].counted_towards_limit == counted


QUOTA: Final[dict[str, Any]] = {
    "conditions": [
        {
            "type": "QuotaReserved",
            "status": "False",
            "reason": "Pending",
            "lastTransitionTime": "2027-01-15T09:00:00Z",
        }
    ]
}
QUEUED: Final[dict[str, Any]] = {"queue_labels": {"kueue.x-k8s.io/queue-name": "default"}}


def test_a_jobset_that_is_gone_ends_its_attempt() -> None:
    gone: dict[str, Any] = {"jobset": None}
    assert last_end(updated(RUNNING, seen=gone)) == ("Requested", DELETED)
    assert last_end(updated(RUNNING, seen=gone, suspend=True, status=QUOTA)) == ("Requested", SUSPENDED)


@pytest.mark.parametrize("end", [{"completed": True}, {"failure_reason": "Failed"}])
def test_a_jobset_that_ended_unseen_had_an_attempt(end: dict[str, Any]) -> None:
    found = updated(of=jobset(**end), known={"started": False})
    assert [attempt.end for attempt in found.attempts] == [1000]


def test_a_suspended_attempt_ends_with_its_last_pod_or_with_its_machines() -> None:
    told = pod(deadline=1010.0)
    stopped = jobset(suspend=True, suspended=True)
    assert updated(RUNNING, pods=(told,), of=stopped).is_running
    assert last_end(updated(RUNNING, pods=(ended(143),), of=stopped)) == ("Requested", SUSPENDED)
    stepped = RUNNING.model_copy(update={"to_step": 5})
    lost = updated(stepped, pods=(told,), of=stopped, seen={"machines": LOST}, **ON_MACHINES)
    assert lost.attempts[-1].cause == "NodeFailure"
    assert "QueuedResource tpu" in (lost.attempts[-1].message or "")
    by_user = updated(stepped, pods=(told,), of=stopped, seen={"machines": LOST}, suspend=True, **ON_MACHINES)
    assert last_end(by_user) == ("Requested", SUSPENDED)
    never_ran = updated(RUNNING, of=stopped, seen={"machines": LOST, "evidence": ()}, **ON_MACHINES)
    assert never_ran.attempts == ()


def test_kueue_takes_the_quota_unless_the_user_suspends() -> None:
    evicted = jobset(suspend=True, suspended=True, **QUEUED)
    has_run = RUNNING.model_copy(update={"to_step": 20})
    assert updated(has_run, of=evicted).attempts[-1].cause == "QueuePreemption"
    assert updated(RUNNING, of=evicted).attempts == ()
    assert last_end(updated(RUNNING, of=evicted, suspend=True)) == ("Requested", SUSPENDED)
    going = jobset(deleting=True, **QUEUED)
    assert last_end(updated(RUNNING, of=going, suspend=True)) == ("Requested", SUSPENDED)


def test_one_failed_pod_ends_an_attempt_unless_a_suspension_stopped_it() -> None:
    assert updated(RUNNING, pods=(pod(),)).is_running
    assert updated(RUNNING, pods=(ended(1), pod(1))).attempts[-1].cause == "ApplicationError"
    told = (ended(143, at=995.0, deadline=1020.0), pod(1, deadline=1020.0))
    ways: tuple[dict[str, Any], ...] = (
        {"of": jobset(suspend=True)},
        {"of": jobset(suspend=True, suspended=True)},
        {"suspend": True},
    )
    for stopping in ways:
        assert updated(RUNNING, pods=told, **stopping).is_running
        assert not updated(RUNNING, pods=(ended(1, at=900.0), pod(1, deadline=1020.0)), **stopping).is_running
    failed = (evidence(0, failed_batch_jobs=(failed_job(),)),)
    assert not updated(RUNNING, seen={"evidence": failed}).is_running
    assert updated(RUNNING, of=jobset(failure_reason="Failed")).attempts[-1].cause == "ApplicationError"


def report(
    step: int | None = 70, *, ordinal: tuple[int, int] = (0, 0), at: float = 600.0, **more: Any
) -> LastReport:
    told = replace(training_report(7, 70, **more), step=step)
    return LastReport(report=told, ordinal=ordinal, received_at=at, pod_uid="p0")


def steps(attempt: Attempt, last: LastReport, **known: Any) -> tuple[int | None, int | None]:
    found = updated(attempt, seen={"report": last}, known=known).attempts[-1]
    return found.from_step, found.to_step


def test_the_steps_of_a_running_attempts_own_reports_are_recorded() -> None:
    known = RUNNING.model_copy(update={"from_step": 10, "to_step": 20})
    assert steps(known, report()) == (10, 70)
    assert steps(known, report(restored=CommitPoint(sequence=4, step=40))) == (40, 70)
    assert steps(known, report(None)) == (10, 20)
    assert steps(known, report(ordinal=(0, 9))) == (10, 20)
    assert steps(known, report(at=99.0)) == (10, 70), "only a suspension gives two attempts one ordinal"
    assert steps(known, report(at=99.0), resumed_at=100) == (10, 20)
    assert steps(FAILED, report()) == (None, None)


def completed(*pods: Pod, **more: Any) -> tuple[str | None, str | None]:
    return last_end(updated(RUNNING, pods=pods, of=jobset(completed=True), **more))


def test_pods_that_exited_0_are_complete_unless_somebody_told_them_to_stop() -> None:
    assert completed(ended(0), ended(0, 1)) == (None, "every pod exited 0")
    told = Termination(code=0, notice="file")
    knows = Termination(code=0, notice="metadata", cause="Maintenance")
    assert completed(ended(0, termination=told)) == ("Requested", "every pod exited 0 after notice 'file'")
    assert completed(ended(0, termination=told), ended(0, 1, termination=knows))[0] == "Maintenance"
    heard = {"report": report(notice="sigterm")}
    assert completed(ended(0), seen=heard) == ("Requested", "every pod exited 0 after notice 'sigterm'")
    assert completed(ended(0), seen={"report": report(ordinal=(0, 9), notice="sigterm")})[0] is None


def test_programs_that_exit_0_when_they_are_told_to_stop_are_not_complete() -> None:
    stopped = ended(0, at=995.0, deadline=1020.0)
    assert completed(stopped) == (
        "Requested",
        "every pod exited 0 after it was told to stop: pod p0 was deleted",
    )
    evicted = replace(stopped, disruption="EvictionByEvictionAPI")
    assert completed(evicted)[0] == "Eviction"
    unclear = ended(0, at=401.0, exit_reason="Completed", deadline=430.0)
    assert completed(unclear) == (
        "Requested",
        "every pod exited 0 after it was told to stop: its pods were deleted",
    )
    knows = ended(0, 1, termination=Termination(code=0, notice="metadata", cause="Maintenance"))
    assert completed(stopped, knows) == ("Maintenance", "every pod exited 0 after notice 'metadata'")


@pytest.mark.parametrize(
    ("asked_for", "message"),
    [(SUSPENDED, "suspended: at step 8"), (DELETED, "its JobSet was deleted; at step 8")],
)
def test_an_end_that_was_asked_for_says_what_was_saved_and_stays_one(asked_for: str, message: str) -> None:
    saved = ended(75, termination=Termination(code=75, decision="at step 8"))
    observed = Observed(evidence=(evidence(0, pod(1), saved),))
    closed = close_as_requested(history(RUNNING), observed, asked_for, now=NOW)
    assert closed.attempts[-1].message == message
    assert was_asked_for(message)
    assert was_suspended(message) is (asked_for == SUSPENDED)
