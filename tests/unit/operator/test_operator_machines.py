"""Test what the loss of machines and their maintenance mean, and when a training is asked to save before it."""

from typing import Any, Final

import pytest

from fake_cluster.facts import ON_MACHINES, make_ended_pod, make_job, make_machines, make_view
from fake_cluster.kubelets import training_report
from fake_cluster.stories import table
from stepkeeper.contract import CommitPoint, Termination
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    Attempt,
    CheckpointStatus,
    CommitStatus,
    SaveRequest,
)
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts import MaintenanceWindow, Pod
from stepkeeper_operator.training_jobs.attempts.attempt_pods import AttemptPods
from stepkeeper_operator.training_jobs.attempts.evidence import Evidence, gather_evidence
from stepkeeper_operator.training_jobs.attempts.machines import explain_loss, find_maintenance
from stepkeeper_operator.training_jobs.decide.save_requests import compute_lead_s
from stepkeeper_operator.training_jobs.observed import Observed

NOW: Final = 10_000.0
RUNNING: Final = Attempt(number=3, start=9000, to_step=70)
PLAIN: Final = make_job()
JOB: Final = make_job(**ON_MACHINES)


def window(begins_at: float, ends_at: float | None = None) -> MaintenanceWindow:
    return MaintenanceWindow(begins_at=begins_at, ends_at=ends_at)


def on(**more: Any) -> Observed:
    return Observed(machines=make_machines(**more))


UNMANAGED: Final = Observed(queued_resources_managed=False)


@pytest.mark.parametrize(
    ("observed", "cause"),
    [
        (on(), None),
        (on(active=False), "NodeFailure"),
        (on(active=False, windows=(window(NOW + 30),)), "Maintenance"),
        (on(active=False, windows=(window(NOW + 90),)), "NodeFailure"),
        (on(active=False, replaced=True), "Requested"),
        (on(deleting=True), "Requested"),
        (Observed(), "Requested"),
        (UNMANAGED, None),
    ],
)
def test_the_loss_of_machines(observed: Observed, cause: str | None) -> None:
    loss = explain_loss(make_view(JOB, observed, now=NOW))
    assert (None if loss is None else loss.cause) == cause
    assert explain_loss(make_view(PLAIN, observed, now=NOW)) is None


@table(
    "announced, goes_on",
    {
        "is about to begin": (window(NOW + 50), True),
        "begins later": (window(NOW + 70), False),
        "is just over": (window(NOW - 100, NOW - 50), True),
        "is over while processes have their time": (window(NOW - 5000, NOW - 340), True),
        "is long over": (window(NOW - 5000, NOW - 400), False),
        "is long": (window(NOW - 5000, NOW + 100), True),
        "has no end": (window(NOW - 3500), True),
        "has no end and began long ago": (window(NOW - 4000), False),
    },
)
def test_maintenance_goes_on_in_a_window_that(announced: MaintenanceWindow, *, goes_on: bool) -> None:
    observed = on(windows=(announced,))
    assert (find_maintenance(make_view(JOB, observed, now=NOW)) is not None) is goes_on
    assert find_maintenance(make_view(PLAIN, observed, now=NOW)) is None


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
    job: CheckpointedTrainingJob = JOB, *pods: Pod, attempt: Attempt = RUNNING, **observed: Any
) -> Evidence:
    own = AttemptPods(pods=pods, present=pods, ordinal=(0, 0))
    return gather_evidence(make_view(job, Observed(**observed), now=NOW), attempt, own)


def heard(ordinal: tuple[int, int] = (0, 0), **more: Any) -> LastReport:
    report = training_report(7, 70, **more)
    return LastReport(report=report, ordinal=ordinal, received_at=NOW, pod_uid="p0")


def with_latest(**more: Any) -> CheckpointedTrainingJob:
    latest = commit(**more).model_dump(mode="json", by_alias=True)
    return make_job(status={"checkpoint": {"latest": latest}})


SAID: Final = make_ended_pod(75, termination=Termination(code=75, committed=CommitPoint(sequence=7, step=1)))
RESUMED: Final = RUNNING.model_copy(update={"from_step": 50})


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
