"""Test the parts of an attempt: its pods and Jobs, its beginning and end, its machines and commits."""

from dataclasses import replace
from typing import Any, Final

import pytest

from fake_cluster.facts import ON_MACHINES, make_ended_pod, make_job, make_machines, make_view
from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_failed_job as failed_job
from fake_cluster.facts import make_history as history
from fake_cluster.facts import make_jobset as jobset
from fake_cluster.facts import make_pod as pod
from fake_cluster.kubelets import training_report
from fake_cluster.stories import table
from stepkeeper.contract import CommitPoint, Termination, Verdict
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    MAX_ATTEMPTS,
    Attempt,
    CheckpointStatus,
    CommitStatus,
    SaveRequest,
)
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts.jobset import BatchJob, JobSet
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.facts.queued_resource import MaintenanceWindow
from stepkeeper_operator.training_jobs.attempts.attempt_pods import AttemptPods, find_pods
from stepkeeper_operator.training_jobs.attempts.ends import close_by, open_attempt, open_if_started
from stepkeeper_operator.training_jobs.attempts.evidence import Evidence, gather_evidence
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.attempts.machines import explain_loss, find_maintenance
from stepkeeper_operator.training_jobs.decide.save_requests import compute_lead_s
from stepkeeper_operator.training_jobs.observed import Observed

NOW: Final = 1000.0
ENDED: Final = Attempt(number=1, start=100, end=500, kind="Disrupted", cause="Eviction", message="evicted")
RUNNING: Final = Attempt(number=1, start=100)
SUSPENDED: Final = ENDED.model_copy(update={"cause": "Requested", "kind": "Suspended"})
NOTHING: Final = Verdict(kind="Completed", cause=None, message="é" * 5000)
EVICTED: Final[dict[str, Any]] = {"disruption": "EvictionByEvictionAPI"}


def seen(*pods: Pod, jobs: tuple[BatchJob, ...] = ()) -> Observed:
    evidence = AttemptEvidence(ordinal=(0, 0), pods=pods, failed_batch_jobs=jobs)
    return Observed(evidence=(evidence,), pods=pods, jobset=jobset())


def found_uids(since: int | None, *pods: Pod, jobs: tuple[BatchJob, ...] = ()) -> set[str]:
    known = history(RUNNING, resumed_at=since)
    found = find_pods(known, seen(*pods, jobs=jobs))
    return {each.uid for each in found.pods} | {each.uid for each in found.failed_batch_jobs}


NEW: Final = pod(created_at=300.0, uid="new")


@table(
    "before, kept",
    {
        "exited 0": (ended(0, **EVICTED), False),
        "failed": (ended(1), True),
        "still stops": (pod(deadline=330.0), True),
        "was killed": (ended(143, deadline=330.0), True),
    },
)
def test_a_pod_whose_place_another_took_is_evidence_unless_it(before: Pod, *, kept: bool) -> None:
    assert found_uids(None, before, NEW, pod(1)) == {"new", "p1"} | ({"p0"} if kept else set())


@table(
    "other, own",
    {
        "was made later": (pod(1, created_at=200.0), True),
        "was made later and has ended": (ended(1, 1, created_at=200.0, at=201.0), True),
        "was made later, and has to end": (pod(1, created_at=200.0, deadline=200.0), True),
        "runs on": (pod(1), True),
        "was asked to end later": (pod(1, deadline=260.0), True),
        "was asked to end before": (pod(1, deadline=220.0), False),
        "ended later": (ended(1, 1, at=250.0), True),
        "ended before": (ended(1, 1, at=150.0), False),
        "ended at a time that is not known": (ended(1, 1, at=None), False),
    },
)
def test_a_pod_is_of_the_attempt_after_a_resumption_if_it(other: Pod, *, own: bool) -> None:
    assert found_uids(200, NEW, other) == {"new"} | ({"p1"} if own else set())


def test_a_job_that_was_made_again_since_has_not_failed() -> None:
    old, new = ended(1, owner_uid="old"), replace(NEW, owner_uid="new")
    assert found_uids(None, old, new, jobs=(failed_job("old"),)) >= {"old", "new"}
    assert found_uids(200, old, new, jobs=(failed_job("old"),)) == {"new"}
    assert found_uids(200, new, jobs=(failed_job("new"),)) == {"new"}


def test_only_so_many_attempts_are_kept_and_messages_are_cut() -> None:
    known = tuple(Attempt(number=n, start=n, end=n, cause="Eviction") for n in range(1, MAX_ATTEMPTS + 1))
    opened = open_attempt(history(*known), make_view(make_job(), Observed()))
    assert [attempt.number for attempt in opened.attempts] == list(range(2, MAX_ATTEMPTS + 2))
    closed = close_by(NOTHING, opened, AttemptPods(), now=NOW)
    assert closed.attempts[-1].message == "é" * 1024


@table(
    "pods, end",
    {
        "its first failure": ((ended(0, at=200.0), ended(1, 1), ended(143, 2, at=401.0)), 400),
        "its last pod": ((ended(0, at=200.0), ended(0, 1)), 400),
        "now while a pod runs": ((ended(0, at=200.0), pod(1)), 1000),
        "now while another container runs": ((ended(1, phase="Running"),), 1000),
        "now by a clock that is ahead": ((ended(1, at=2000.0),), 1000),
        "its start by a clock that is behind": ((ended(1, at=50.0),), 100),
        "a failure behind a shell": ((ended(0, termination=Termination(code=1)), pod(1)), 400),
        "now where no time is given": ((ended(1, at=None),), 1000),
        "now where nothing was seen": ((), 1000),
    },
)
def test_an_attempt_ends_with(pods: tuple[Pod, ...], end: int) -> None:
    own = AttemptPods(pods=pods, present=pods, ordinal=(0, 0))
    assert close_by(NOTHING, history(RUNNING), own, now=NOW).attempts[-1].end == end


def resumed(*known: Attempt, of: JobSet, observed: Observed | None = None, **more: Any) -> JobHistory:
    return open_if_started(history(*known, **more), make_view(make_job(), observed or Observed()), of)


@pytest.mark.parametrize("state", ["deleting", "completed", "suspend", "suspended"])
def test_nothing_begins_in_a_jobset_that_is(state: str) -> None:
    assert resumed(SUSPENDED, of=jobset(**{state: True}), started=False).attempts == (SUSPENDED,)


LATER: Final = jobset(resumed_at=700.0)


@table(
    "known, of, since",
    {
        "after a suspension": ((SUSPENDED,), LATER, 700),
        "after another end": ((ENDED,), LATER, 700),
        "at first": ((), LATER, 700),
        "at a time that JobSet doesn't say": ((SUSPENDED,), jobset(), 1000),
        "in the second of the suspension": ((SUSPENDED,), jobset(resumed_at=500.0), 500),
        "long before the end": ((ENDED,), jobset(resumed_at=50.0), None),
        "by JobSet's restart": ((ENDED,), jobset(), None),
    },
)
def test_a_resumption_is_an_attempt_from_the_time_that_jobset_says(
    known: tuple[Attempt, ...], of: JobSet, since: int | None
) -> None:
    opened = resumed(*known, of=of)
    assert opened.operator.resumed_at == since
    assert len(opened.attempts) == len(known) + (since is not None)


def test_the_first_start_of_a_jobset_is_an_attempt_and_a_failed_job_is_restarted_first() -> None:
    assert len(resumed(ENDED, of=jobset(), started=False).attempts) == 2
    observed = seen(ended(1), jobs=(failed_job(),))
    assert resumed(ENDED, of=LATER, observed=observed).attempts == (ENDED,)


AT: Final = 10_000.0
THIRD: Final = Attempt(number=3, start=9000, to_step=70)
PLAIN: Final = make_job()
JOB: Final = make_job(**ON_MACHINES)


def window(begins_at: float, ends_at: float | None = None) -> MaintenanceWindow:
    return MaintenanceWindow(begins_at=begins_at, ends_at=ends_at)


def on(**more: Any) -> Observed:
    return Observed(machines=make_machines(**more))


@pytest.mark.parametrize(
    ("observed", "cause"),
    [
        (on(), None),
        (on(active=False), "NodeFailure"),
        (on(active=False, windows=(window(AT + 30),)), "Maintenance"),
        (on(active=False, windows=(window(AT + 90),)), "NodeFailure"),
        (on(active=False, replaced=True), "Requested"),
        (on(deleting=True), "Requested"),
        (Observed(), "Requested"),
        (Observed(queued_resources_managed=False), None),
    ],
)
def test_the_loss_of_machines(observed: Observed, cause: str | None) -> None:
    loss = explain_loss(make_view(JOB, observed, now=AT))
    assert (None if loss is None else loss.cause) == cause
    assert explain_loss(make_view(PLAIN, observed, now=AT)) is None


@table(
    "announced, goes_on",
    {
        "is about to begin": (window(AT + 50), True),
        "begins later": (window(AT + 70), False),
        "is just over": (window(AT - 100, AT - 50), True),
        "is over while processes have their time": (window(AT - 5000, AT - 340), True),
        "is long over": (window(AT - 5000, AT - 400), False),
        "is long": (window(AT - 5000, AT + 100), True),
        "has no end": (window(AT - 3500), True),
        "has no end and began long ago": (window(AT - 4000), False),
    },
)
def test_maintenance_goes_on_in_a_window_that(announced: MaintenanceWindow, *, goes_on: bool) -> None:
    observed = on(windows=(announced,))
    assert (find_maintenance(make_view(JOB, observed, now=AT)) is not None) is goes_on
    assert find_maintenance(make_view(PLAIN, observed, now=AT)) is None


def commit(sequence: int = 7, step: int = 60, **more: Any) -> CommitStatus:
    return CommitStatus(sequence=sequence, step=step, uri="gs://bucket/runs/lm/60/1-abc", **more)


def asked(**more: Any) -> SaveRequest:
    base: dict[str, Any] = {
        "id": "maintenance-10060-3",
        "attempt": 3,
        "maintenance_time": 10_060,
        "time": 9990,
        "latest_sequence": 7,
    }
    return SaveRequest(**(base | more))


def test_the_time_before_maintenance_follows_the_last_save() -> None:
    for millis, lead_s in ((None, 120), (1000, 120), (100_000, 300), (9_000_000, 3600)):
        assert compute_lead_s(CheckpointStatus(latest=commit(duration_millis=millis))) == lead_s
    assert compute_lead_s(CheckpointStatus()) == 120


def gather(
    job: CheckpointedTrainingJob = JOB, *pods: Pod, attempt: Attempt = THIRD, **observed: Any
) -> Evidence:
    own = AttemptPods(pods=pods, present=pods, ordinal=(0, 0))
    return gather_evidence(make_view(job, Observed(**observed), now=AT), attempt, own)


def heard(ordinal: tuple[int, int] = (0, 0), **more: Any) -> LastReport:
    report = training_report(7, 70, **more)
    return LastReport(report=report, ordinal=ordinal, received_at=AT, pod_uid="p0")


def with_latest(**more: Any) -> CheckpointedTrainingJob:
    latest = commit(**more).model_dump(mode="json", by_alias=True)
    return make_job(status={"checkpoint": {"latest": latest}})


SAID: Final = make_ended_pod(75, termination=Termination(code=75, committed=CommitPoint(sequence=7, step=1)))
RESUMED: Final = THIRD.model_copy(update={"from_step": 50})


@table(
    "found, committed",
    {
        "nothing": (gather(PLAIN), False),
        "a pod's last words": (gather(PLAIN, SAID), True),
        "its report": (gather(PLAIN, report=heard()), True),
        "not another attempt's report": (gather(PLAIN, report=heard((0, 9))), False),
        "the status": (gather(with_latest(time=9001)), True),
        "not a commit before it": (gather(with_latest(time=8999)), False),
        "a step after its first": (gather(with_latest(time=8999), attempt=RESUMED), True),
        "not the step it restored": (gather(with_latest(time=8999, step=50), attempt=RESUMED), False),
    },
)
def test_an_attempt_has_committed_by(found: Evidence, *, committed: bool) -> None:
    assert found.has_committed is committed
