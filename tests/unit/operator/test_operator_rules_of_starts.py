"""Test the rules that say what the next start waits for, each by itself."""

from dataclasses import replace
from typing import Any, Final

from fake_cluster.facts import ON_MACHINES, make_job, make_machines
from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_failed_job as failed_job
from fake_cluster.facts import make_history as history
from fake_cluster.facts import make_observed as seen
from fake_cluster.facts import make_unedited_jobset as jobset
from fake_cluster.kubelets import training_report
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    Attempt,
    Bookkeeping,
)
from stepkeeper_operator.build import template_hash
from stepkeeper_operator.cache.memory import Rejection
from stepkeeper_operator.cache.reports import LastReport
from stepkeeper_operator.facts import Workload
from stepkeeper_operator.observed import Observed
from stepkeeper_operator.policy import starts
from stepkeeper_operator.policy.attempts import DELETED
from stepkeeper_operator.policy.history import JobHistory
from stepkeeper_operator.policy.planning import plan
from stepkeeper_operator.policy.planning.plan import Plan

NOW: Final = 1000.0


RUNNING: Final = Attempt(number=1, start=900)


FAILED: Final = Attempt(number=1, start=900, end=990, cause="ApplicationError", message="exit 1")


EVICTED: Final = Attempt(number=1, start=900, end=990, cause="Eviction", message="drained")


DONE: Final = Attempt(number=1, start=900, end=990, message="every pod exited 0")


JOB: Final = make_job()


def delay(
    job: CheckpointedTrainingJob = JOB, wait_s: float = 0.0, **observed: Any
) -> tuple[str, float | None] | None:
    return plan.find_delay(job, Observed(**observed), history(), wait_s=wait_s, now=NOW)


def test_the_next_jobset_waits_for_one_thing_after_another() -> None:
    assert delay() is None
    suspended = delay(make_job(suspend=True))
    held = delay(make_job(suspend=True), held=True)
    assert suspended is not None
    assert held is not None
    assert suspended[0] == "it is suspended"
    assert "not accepted" in held[0]
    assert delay(held=True) == held
    machines = delay(make_job(**ON_MACHINES))
    assert machines is not None
    assert "QueuedResource tpu" in machines[0]
    assert delay(wait_s=7.0) == (plan.BACKING_OFF, 7.0)


def test_a_refused_jobset_is_tried_again_after_a_minute() -> None:
    refused = Rejection(generation=1, status=403, message="quota", at=NOW - 20, since=NOW - 20, told=False)
    assert delay(rejection=refused) == (
        "the API server refuses its JobSet: condition Accepted says why",
        40.0,
    )
    assert delay(rejection=replace(refused, at=NOW - 60)) is None


def hold(known: JobHistory, observed: Observed, now: float = NOW, **restarts: Any) -> Plan:
    return plan.hold_next_start(
        make_job(restarts=restarts), observed, Plan(history=known, job_set=None), now=now
    )


BACKOFF: Final[dict[str, Any]] = {"initialSeconds": 60, "maxSeconds": 60}


def test_a_restart_in_place_waits_unless_jobset_limits_it_itself() -> None:
    saved, counted = seen(ended(1), ended(75, 1)), seen(ended(1))
    held = hold(history(FAILED), saved, backoff=BACKOFF)
    assert (held.waiting, held.look_again_s, held.history.bookkeeping.not_before) == (
        plan.BACKING_OFF,
        50,
        1050,
    )
    assert hold(history(FAILED), counted, backoff=BACKOFF).waiting is None
    assert hold(history(FAILED), seen(), backoff=BACKOFF).waiting is None, "nobody saw its end"
    assert hold(history(FAILED), saved, now=1051.0, backoff=BACKOFF).waiting is None
    assert hold(history(RUNNING, starts_without_checkpoint=9), saved, backoff=BACKOFF).waiting is None
    assert hold(history(DONE, starts_without_checkpoint=9), saved, backoff=BACKOFF).waiting is None


def test_a_restart_that_jobset_has_begun_is_judged_by_its_own_count() -> None:
    for counted, waiting in ((1, None), (0, plan.BACKING_OFF)):
        begun = seen(
            ended(1), ended(75 if counted else 1, 1), jobset=jobset(restarts=1, restarts_counted=counted)
        )
        assert hold(history(FAILED), begun, backoff=BACKOFF).waiting == waiting


def test_starts_after_other_ends_wait_from_their_start() -> None:
    early = EVICTED.model_copy(update={"end": 910})
    assert (
        hold(history(early, starts_without_checkpoint=1), seen(ended(1)), now=911.0, backoff=BACKOFF).waiting
        is None
    )
    held = hold(history(early, starts_without_checkpoint=2), seen(ended(1)), now=911.0, backoff=BACKOFF)
    assert held.history.bookkeeping.not_before == 960


def next_start(
    attempt: Attempt,
    job: CheckpointedTrainingJob | None = None,
    observed: Observed | None = None,
    **more: Any,
) -> float | None:
    spaced = make_job(restarts={"backoff": {"initialSeconds": 10, "maxSeconds": 1000}})
    return starts.compute_next_start(job or spaced, observed or Observed(), history(attempt, **more))


def test_when_the_next_start_may_be() -> None:
    assert next_start(FAILED) == 1000
    assert next_start(FAILED, failures=3) == 990 + 80
    assert next_start(FAILED, make_job(restarts={"backoff": {"initialSeconds": 0}})) is None
    assert next_start(EVICTED, starts_without_checkpoint=1) is None
    assert next_start(EVICTED, starts_without_checkpoint=2) is None, "it ran for longer than it has to wait"
    assert next_start(EVICTED, starts_without_checkpoint=6) == 900 + 160
    assert next_start(DONE, starts_without_checkpoint=6) is None
    asked_for = EVICTED.model_copy(update={"cause": "Requested", "message": DELETED})
    assert next_start(asked_for, starts_without_checkpoint=6) is None
    assert next_start(FAILED, started_template="another") is None, "what was edited may be mended"


def test_what_was_edited_since_the_newest_start() -> None:
    same, other = Bookkeeping(started_template=template_hash(JOB)), Bookkeeping(started_template="another")
    on_machines = make_job(**ON_MACHINES)
    assert not starts.was_edited(JOB, Observed(), same)
    assert starts.was_edited(JOB, Observed(), other)
    assert not starts.was_edited(JOB, Observed(), Bookkeeping())
    assert not starts.was_edited(JOB, Observed(held=True), other)
    assert not starts.was_edited(on_machines, Observed(), other)
    assert starts.was_edited(on_machines, Observed(machines=make_machines()), other)


FEW: Final = make_job(restarts={"maxStartsWithoutCheckpoint": 2})


def limit(known: JobHistory, **observed: Any) -> bool:
    base: dict[str, Any] = {"jobset": jobset()}
    return starts.is_limit_reached(FEW, Observed(**(base | observed)), known, now=NOW)


def test_the_last_start_that_is_allowed_may_run() -> None:
    assert limit(history(EVICTED, starts_without_checkpoint=2))
    assert not limit(history(EVICTED, starts_without_checkpoint=1))
    assert not limit(history(RUNNING, starts_without_checkpoint=2))
    assert limit(history(RUNNING, starts_without_checkpoint=3))


def test_a_start_goes_on_by_the_limit_that_it_began_with_or_a_greater_one() -> None:
    assert not limit(history(RUNNING, starts_without_checkpoint=3, starts_allowed=3))
    assert limit(history(RUNNING, starts_without_checkpoint=4, starts_allowed=3))
    assert not limit(history(RUNNING, starts_without_checkpoint=2, starts_allowed=1))
    assert limit(history(EVICTED, starts_without_checkpoint=2, starts_allowed=3)), (
        "the next one has not begun"
    )


def heard(*, ordinal: tuple[int, int] = (0, 0), **more: Any) -> LastReport:
    return LastReport(report=training_report(7, 70, **more), ordinal=ordinal, received_at=NOW, pod_uid="p0")


def test_a_new_operator_lets_more_starts_run_for_a_minute_until_it_hears_of_a_root() -> None:
    over = history(RUNNING, starts_without_checkpoint=3)

    def wait_s(known: JobHistory = over, **more: Any) -> float | None:
        base: dict[str, Any] = {"jobset": jobset(), "operator_started_at": NOW - 20}
        observed = Observed(**(base | more))
        return starts.compute_report_wait_s(FEW, observed, known, now=NOW)

    assert wait_s() == 40
    assert wait_s(operator_started_at=NOW - 60) is None
    assert wait_s(jobset=None) is None
    assert wait_s(jobset=jobset(suspend=True)) is None
    assert wait_s(history(EVICTED, starts_without_checkpoint=3)) is None
    assert wait_s(history(RUNNING, starts_without_checkpoint=2)) is None
    assert wait_s(report=heard()) is None
    assert wait_s(report=heard(ordinal=(0, 9))) == 40
    assert wait_s(report=heard(root=None, commits=(), head=None)) == 40
    assert not limit(over, operator_started_at=NOW - 20)


def test_the_limit_is_explained_in_the_singular_and_the_plural() -> None:
    assert starts.explain_limit(FEW, history(EVICTED, starts_without_checkpoint=2)).startswith(
        "2 starts in a row have committed no new checkpoint; spec.restarts.maxStartsWithoutCheckpoint allows 2. The "
        "last ended by Eviction: drained."
    )
    assert starts.explain_limit(FEW, history(RUNNING, starts_without_checkpoint=1)).startswith("1 start has ")


QUEUED: Final[dict[str, Any]] = {"queue_labels": {"kueue.x-k8s.io/queue-name": "default"}}


def has_left(job: CheckpointedTrainingJob, **observed: Any) -> bool:
    return starts.has_left_queue(job, Observed(**observed), now=NOW)


def quota(reason: str, *, kind: str = "QuotaReserved") -> dict[str, Any]:
    time = "2027-01-15T09:00:00Z"
    condition = {
        "type": kind,
        "status": "False",
        "reason": reason,
        "message": "",
        "lastTransitionTime": time,
    }
    return {"conditions": [condition]}


def test_a_job_has_left_its_queue_when_its_jobset_is_gone_or_going_because_it_stops() -> None:
    queued = make_job(suspend=True, status=quota("Pending"))
    assert has_left(queued)
    assert not has_left(make_job(status=quota("Pending")))
    assert not has_left(make_job(suspend=True))
    assert not has_left(make_job(suspend=True, status=quota(starts.NOT_QUEUED)))
    assert not has_left(make_job(suspend=True, status=quota("Pending", kind="Running")))
    assert has_left(queued, jobset=jobset(deleting=True, **QUEUED))
    assert not has_left(queued, jobset=jobset(**QUEUED))
    assert not has_left(queued, jobset=jobset(deleting=True))
    assert has_left(make_job(status=quota("Pending"), **ON_MACHINES)), "its machines are gone"


def leaves(job: CheckpointedTrainingJob, **observed: Any) -> bool:
    return starts.leaves_queue(job, Observed(**observed), history(RUNNING), now=NOW)


def test_only_a_queued_job_leaves_a_queue() -> None:
    suspended = make_job(suspend=True)
    assert leaves(suspended, jobset=jobset(**QUEUED))
    assert not leaves(JOB, jobset=jobset(**QUEUED))
    assert not leaves(suspended, jobset=jobset())
    by_kueue = Workload(
        namespace="default",
        name="w",
        uid="w",
        jobset_name="lm",
        jobset_uid="s",
        quota_reserved=True,
        reason="",
        message="",
        eviction=None,
    )
    assert leaves(suspended, jobset=jobset(), workload=by_kueue)
    assert starts.should_suspend(FEW, Observed(), history(EVICTED, starts_without_checkpoint=2), now=NOW)


def test_a_failed_job_of_a_restart_is_counted_by_what_its_job_says() -> None:
    neutral = failed_job(message="failed with exit code 75 matching FailJob rule")
    assert hold(history(FAILED), seen(ended(1), jobs=(neutral,)), backoff=BACKOFF).waiting == plan.BACKING_OFF
    assert hold(history(FAILED), seen(ended(1), jobs=(failed_job(),)), backoff=BACKOFF).waiting is None
