"""Test what becomes of a job's history: restarts that were seen or not, ends, commits, and the reports' steps."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.facts import ON_MACHINES, make_job, make_machines, make_view
from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_failed_job as failed_job
from fake_cluster.facts import make_history as history
from fake_cluster.facts import make_jobset as jobset
from fake_cluster.facts import make_pod as pod
from fake_cluster.kubelets import training_report
from fake_cluster.stories import table
from stepkeeper.contract import CommitPoint, Termination
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt, OperatorState
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts.jobset import JobSet
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.training_jobs.attempts.ends import DELETED, SUSPENDED
from stepkeeper_operator.training_jobs.attempts.following import update_history
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.attempts.restarts_in_place import record_restarts
from stepkeeper_operator.training_jobs.build.jobset import template_hash
from stepkeeper_operator.training_jobs.observed import Observed

RUNNING: Final = Attempt(number=1, start=100)
STEPPED: Final = RUNNING.model_copy(update={"to_step": 20})
FAILED: Final = Attempt(
    number=1, start=100, end=990, kind="Failed", cause="ApplicationError", message="exit 1"
)
EVICTED: Final = FAILED.model_copy(update={"kind": "Disrupted", "cause": "Eviction"})
JOB: Final = make_job()
TWO_HOSTS: Final[dict[str, Any]] = {
    "placement": {"tpu": ON_MACHINES["placement"]["tpu"] | {"topology": "2x2x2"}}
}
LOST: Final = make_machines(active=False)


def evidence(restarts: int, *pods: Pod, **more: Any) -> AttemptEvidence:
    return AttemptEvidence(ordinal=(0, restarts), pods=pods, **more)


def record(
    known: JobHistory, *seen: AttemptEvidence, of: JobSet, job: CheckpointedTrainingJob = JOB, **more: Any
) -> JobHistory:
    return record_restarts(known, make_view(job, Observed(evidence=seen, jobset=of, **more)), of)


FAILED_JOB: Final = (evidence(0, failed_batch_jobs=(failed_job(),)),)
TWO: Final = jobset(restarts=2, restarts_counted=1)
ONE_SEEN: Final = history(RUNNING, restarts_seen=1, counted_restarts_seen=1)


@table(
    "known, seen, of, found",
    {
        "an attempt too": (history(started=False), (), jobset(restarts=1), ["Disruption", None]),
        "a hang": (history(RUNNING), (), jobset(restarts=1, rule="hang"), ["Hang", None]),
        "one of two": (history(RUNNING), (), TWO, ["Disruption", "ApplicationError", None]),
        "the known one": (history(FAILED), (), TWO, ["ApplicationError", "Disruption", None]),
        "the other one": (history(EVICTED), (), TWO, ["Eviction", "ApplicationError", None]),
        "one counted before": (ONE_SEEN, (), TWO, ["Disruption", None]),
        "one that its pods show": (
            history(RUNNING),
            (evidence(0, ended(1)),),
            TWO,
            ["ApplicationError", "Disruption", None],
        ),
        "one that its Job shows": (
            history(RUNNING),
            FAILED_JOB,
            jobset(restarts=1, restarts_counted=1),
            ["ApplicationError", None],
        ),
    },
)
def test_unseen_ends_are_failures_as_often_as_jobset_has_counted_some(
    known: JobHistory, seen: tuple[AttemptEvidence, ...], of: JobSet, found: list[str | None]
) -> None:
    recorded = record(known, *seen, of=of)
    assert [attempt.cause for attempt in recorded.attempts] == found
    noted = recorded.operator
    assert (noted.restarts_seen, noted.counted_restarts_seen) == (of.restarts, of.restarts_counted)


def test_an_unseen_end_is_the_start_of_the_next_attempt() -> None:
    seen = evidence(1, pod(created_at=950.0))
    found = record(history(RUNNING, resumed_at=150), seen, of=jobset(restarts=1))
    assert (found.attempts[0].end, found.attempts[1].start) == (950, 950)
    assert found.operator.resumed_at is None


def test_a_restart_begins_no_attempt_while_it_is_suspended_and_has_no_pods() -> None:
    held = jobset(restarts=1, suspend=True)
    assert record(history(FAILED), of=held).attempts == (FAILED,)
    assert len(record(history(FAILED), evidence(1, pod()), of=held).attempts) == 2


def running_since(status: str, at: str) -> dict[str, Any]:
    return {"conditions": [{"type": "Running", "status": status, "reason": "r", "lastTransitionTime": at}]}


BEFORE: Final = "1970-01-01T00:01:00Z"


@table(
    "attempt, pods, status, late",
    {
        "only one of its pods has run": (RUNNING, (pod(),), {}, True),
        "one of its pods hasn't started": (RUNNING, (pod(), pod(1, started=False)), {}, True),
        "not if its pods have all run": (RUNNING, (pod(), pod(1)), {}, False),
        "not if it made steps": (STEPPED, (), {}, False),
        "nothing was seen of it": (RUNNING, (), {}, True),
        "it didn't run by the status": (RUNNING, (), running_since("False", BEFORE), True),
        "not if it ran and stopped": (RUNNING, (), running_since("False", "1970-01-01T00:05:00Z"), False),
        "not if it runs by the status": (RUNNING, (), running_since("True", BEFORE), False),
    },
)
def test_an_attempt_came_too_late_for_its_machines_if(
    attempt: Attempt, pods: tuple[Pod, ...], status: dict[str, Any], *, late: bool
) -> None:
    job, seen = make_job(status=status, **TWO_HOSTS), (evidence(0, *pods),) if pods else ()
    for machines, n_attempts in ((LOST, 1 if late else 2), (make_machines(), 2)):
        found = record(history(attempt), *seen, of=jobset(restarts=1), job=job, machines=machines)
        assert len(found.attempts) == n_attempts, "a restart that came too late is none"


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
    operator = OperatorState(**({"job_sets": 1, "started": True} | (known or {})))
    own: dict[str, Any] = {
        "attempts": [each.model_dump(mode="json", by_alias=True) for each in attempts],
        "operator": operator.model_dump(mode="json", by_alias=True),
    }
    job = make_job(status=own | (status or {}), **spec)
    base: dict[str, Any] = {"jobset": of or jobset(), "pods": pods, "evidence": (evidence(0, *pods),)}
    observed = Observed(**(base | (seen or {})))
    return update_history(make_view(job, observed), new_commit=commit)


FIVE: Final[dict[str, Any]] = {"starts_without_checkpoint": 5}
SAME: Final = FIVE | {"started_template": template_hash(JOB)}


@table(
    "attempt, more, n_starts",
    {
        "a commit": (RUNNING, {"commit": True, "known": FIVE}, 0),
        "a commit in unseen starts": (RUNNING, {"commit": True, "of": jobset(restarts=2)}, 1),
        "no commit": (RUNNING, {"known": FIVE}, 5),
        "a suspension": (FAILED, {"suspend": True, "known": FIVE}, 0),
        "an edit": (FAILED, {"known": FIVE | {"started_template": "another"}}, 0),
        "no edit": (FAILED, {"known": SAME}, 5),
    },
)
def test_starts_without_a_commit_are_counted_until(
    attempt: Attempt, more: dict[str, Any], n_starts: int
) -> None:
    assert updated(attempt, **more).operator.starts_without_checkpoint == n_starts


@pytest.mark.parametrize(
    ("cause", "towards", "restarts", "left"),
    [
        ("ApplicationError", 1, {"resetOnNewCheckpoint": True}, 0),
        ("ApplicationError", 1, {"resetOnNewCheckpoint": False}, 1),
        ("Eviction", 0, {}, 0),
        ("Eviction", 0, {"maxDisruptions": 9}, 1),
    ],
)
def test_a_commit_refills_failures_where_the_job_wants_it_and_disruptions_count_where_there_is_a_limit(
    cause: str, towards: int, restarts: dict[str, Any], left: int
) -> None:
    entry = {"cause": cause, "count": 1, "countedTowardsLimit": towards}
    status = {"restarts": {"total": 1, "byCause": [entry]}}
    found = updated(RUNNING, commit=True, status=status, restarts=restarts)
    assert found.restarts.by_cause[0].counted_towards_limit == left


QUOTA: Final[dict[str, Any]] = {
    "conditions": [
        {"type": "QuotaReserved", "status": "False", "reason": "Pending", "lastTransitionTime": BEFORE}
    ]
}
QUEUED: Final[dict[str, Any]] = {"queue_labels": {"kueue.x-k8s.io/queue-name": "default"}}
TOLD: Final = pod(deadline=1010.0)
IDLE: Final[dict[str, Any]] = {"suspend": True, "suspended": True}
STOPPED: Final = jobset(**IDLE)
NO_QUOTA: Final = jobset(**IDLE, **QUEUED)
GOING: Final = jobset(deleting=True, **QUEUED)
STOP: Final[dict[str, Any]] = {"suspend": True}
GONE: Final[dict[str, Any]] = {"seen": {"jobset": None}}
LEFT: Final[dict[str, Any]] = {"pods": (TOLD,), "of": STOPPED, "seen": {"machines": LOST}} | ON_MACHINES
UNSEEN: Final = LEFT | {"seen": {"machines": LOST, "evidence": ()}, "pods": ()}
KILLED: Final = (ended(143, at=995.0, deadline=1020.0), pod(1, deadline=1020.0))
FAILED_BEFORE: Final = (ended(1, at=900.0), pod(1, deadline=1020.0))


@table(
    "attempt, more, cause, message",
    {
        "its JobSet is gone": (RUNNING, GONE, "Requested", DELETED),
        "it left its queue": (RUNNING, GONE | STOP | {"status": QUOTA}, "Requested", SUSPENDED),
        "it stops, a pod has not ended": (RUNNING, {"pods": (TOLD,), "of": STOPPED}, None, ""),
        "it stopped": (RUNNING, {"pods": (ended(143),), "of": STOPPED}, "Requested", SUSPENDED),
        "it stops, its machines are gone": (STEPPED, LEFT, "NodeFailure", "QueuedResource tpu"),
        "its user stops it, and they are gone": (STEPPED, LEFT | STOP, "Requested", SUSPENDED),
        "Kueue takes its quota": (STEPPED, {"of": NO_QUOTA}, "QueuePreemption", ""),
        "Kueue takes it as it stops": (RUNNING, {"of": NO_QUOTA} | STOP, "Requested", SUSPENDED),
        "its queued JobSet is deleted": (RUNNING, {"of": GOING} | STOP, "Requested", SUSPENDED),
        "it runs": (RUNNING, {"pods": (pod(),)}, None, ""),
        "one pod failed": (RUNNING, {"pods": (ended(1), pod(1))}, "ApplicationError", ""),
        **{
            f"one pod {what}, {state}": (RUNNING, {"pods": pods} | stopping, cause, "")
            for pods, cause, what in ((KILLED, None, "killed"), (FAILED_BEFORE, "ApplicationError", "failed"))
            for state, stopping in (
                ("it is suspended", STOP),
                ("JobSet suspends", {"of": jobset(suspend=True)}),
                ("JobSet has suspended", {"of": STOPPED}),
            )
        },
        "a Job failed": (RUNNING, {"seen": {"evidence": FAILED_JOB}}, "Requested", ""),
        "its JobSet failed": (RUNNING, {"of": jobset(failure_reason="Failed")}, "ApplicationError", ""),
    },
)
def test_an_attempt_ends_when(
    attempt: Attempt, more: dict[str, Any], cause: str | None, message: str
) -> None:
    found = updated(attempt, **more).attempts[-1]
    assert (found.cause, found.end is not None) == (cause, cause is not None)
    assert message in (found.message or "")


@pytest.mark.parametrize("more", [UNSEEN, {"of": NO_QUOTA}], ids=["machines", "quota"])
def test_an_attempt_that_was_taken_its_machines_or_quota_before_it_ran_is_none(more: dict[str, Any]) -> None:
    assert updated(RUNNING, **more).attempts == ()


@pytest.mark.parametrize("end", [{"completed": True}, {"failure_reason": "Failed"}])
def test_a_jobset_that_ended_unseen_had_an_attempt(end: dict[str, Any]) -> None:
    found = updated(of=jobset(**end), known={"started": False})
    assert [attempt.end for attempt in found.attempts] == [1000]


def report(
    step: int | None = 70, *, ordinal: tuple[int, int] = (0, 0), at: float = 600.0, **more: Any
) -> LastReport:
    said = replace(training_report(7, 70, **more), step=step)
    return LastReport(report=said, ordinal=ordinal, received_at=at, pod_uid="p0")


@pytest.mark.parametrize(
    ("last", "known", "steps"),
    [
        (report(), {}, (10, 70)),
        (report(restored=CommitPoint(sequence=4, step=40)), {}, (40, 70)),
        (report(None), {}, (10, 20)),
        (report(ordinal=(0, 9)), {}, (10, 20)),
        (report(at=99.0), {}, (10, 70)),
        (report(at=99.0), {"resumed_at": 100}, (10, 20)),
    ],
)
def test_the_steps_of_a_running_attempts_own_reports_are_recorded(
    last: LastReport, known: dict[str, Any], steps: tuple[int, int]
) -> None:
    before = STEPPED.model_copy(update={"from_step": 10})
    found = updated(before, seen={"report": last}, known=known).attempts[-1]
    assert (found.from_step, found.to_step) == steps
    assert updated(FAILED, seen={"report": last}).attempts[-1].to_step is None


STOPPED_WITH_0: Final = ended(0, at=995.0, deadline=1020.0)
DISRUPTED: Final = replace(STOPPED_WITH_0, disruption="EvictionByEvictionAPI")
BY_FILE: Final = ended(0, termination=Termination(code=0, notice="file"))
KNOWS: Final = ended(0, 1, termination=Termination(code=0, notice="metadata", cause="Maintenance"))
UNCLEAR: Final = ended(0, at=401.0, exit_reason="Completed", deadline=430.0)


@table(
    "pods, last, cause, message",
    {
        "by themselves": ((ended(0), ended(0, 1)), None, None, ""),
        "after a notice": ((BY_FILE,), None, "Requested", " after notice 'file'"),
        "for a known cause": ((BY_FILE, KNOWS), None, "Maintenance", " after notice 'file'"),
        "as reported": ((ended(0),), report(notice="sigterm"), "Requested", " after notice 'sigterm'"),
        "after an older report": ((ended(0),), report(ordinal=(0, 9), notice="sigterm"), None, ""),
        "deleted": ((STOPPED_WITH_0,), None, "Requested", " after it was asked to stop: pod p0 was deleted"),
        "evicted": ((DISRUPTED,), None, "Eviction", ""),
        "unclear": ((UNCLEAR,), None, "Requested", " after it was asked to stop: its pods were deleted"),
        "deleted, one knows": ((STOPPED_WITH_0, KNOWS), None, "Maintenance", " after notice 'metadata'"),
    },
)
def test_pods_that_exited_0_are_complete_unless_they_were_told_to_stop(
    pods: tuple[Pod, ...], last: LastReport | None, cause: str | None, message: str
) -> None:
    found = updated(RUNNING, pods=pods, of=jobset(completed=True), seen={"report": last}).attempts[-1]
    assert found.cause == cause
    assert (found.message or "").startswith(f"every pod exited 0{message}")
