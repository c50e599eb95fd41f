"""Test what is planned next: the job's end, a new JobSet, a stop or a wait."""

from dataclasses import replace
from typing import Any, Final

from fake_cluster.facts import ON_MACHINES, make_job, make_jobset, make_machines, make_view
from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_history as history
from fake_cluster.facts import make_observed as seen
from fake_cluster.facts import make_unedited_jobset as jobset
from fake_cluster.stories import table
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt, OperatorState
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts.jobset import JobSet
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.training_jobs.attempts.ends import NOT_ALLOWED
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.build.jobset import machines_hash, template_hash
from stepkeeper_operator.training_jobs.decision import DeleteJobSet, SetSuspend
from stepkeeper_operator.training_jobs.observed import Observed
from stepkeeper_operator.training_jobs.policy.next_step import find_change, plan_next, plan_without_jobset
from stepkeeper_operator.training_jobs.policy.plan import Plan

NOW: Final = 1000.0
RUNNING: Final = Attempt(number=1, start=900)
SECOND: Final = Attempt(number=2, start=995)
ENDED: Final = Attempt(number=1, start=900, end=990)
FAILED: Final = ENDED.model_copy(update={"kind": "Failed", "cause": "ApplicationError", "message": "exit 1"})
GUESSED: Final = FAILED.model_copy(update={"inferred": True})
FATAL: Final = FAILED.model_copy(update={"kind": "Unrecoverable"})
EVICTED: Final = ENDED.model_copy(update={"kind": "Disrupted", "cause": "Eviction", "message": "drained"})
JOB: Final = make_job()
TPU_JOB: Final = make_job(**ON_MACHINES)
FEW: Final = make_job(restarts={"maxStartsWithoutCheckpoint": 2})
NONE_LEFT: Final = make_job(restarts={"maxFailures": 0, "maxDisruptions": 0})
ONE_LEFT: Final = make_job(restarts={"maxFailures": 1, "maxDisruptions": 1})
STOPPED: Final = make_job(suspend=True)
QUEUED: Final[dict[str, Any]] = {"queue_labels": {"kueue.x-k8s.io/queue-name": "default"}}
IDLE: Final[dict[str, Any]] = {"suspend": True, "suspended": True}
MINUTE: Final[dict[str, Any]] = {"initialSeconds": 60, "maxSeconds": 60}


def plan(known: JobHistory, observed: Observed, job: CheckpointedTrainingJob = JOB) -> Plan:
    return plan_next(make_view(job, observed), known)


def recorded(*known: Attempt, max_failures: int = 1) -> CheckpointedTrainingJob:
    attempts = [each.model_dump(mode="json", by_alias=True) for each in known]
    return make_job(status={"attempts": attempts}, restarts={"maxFailures": max_failures})


MOVED: Final = make_job(labels={"kueue.x-k8s.io/queue-name": "other"})
EDITED: Final = jobset(template_hash="another")
READY: Final = make_machines()
ON_READY: Final[dict[str, Any]] = {"template_hash": template_hash(TPU_JOB, READY)}
ON: Final[dict[str, Any]] = {"machines": READY}
OTHERS: Final = make_jobset(suspended=True, machines_hash="others", **ON_READY)


@table(
    "job, of, observed, attempt, changed",
    {
        "nothing": (JOB, jobset(), {}, RUNNING, False),
        "an edit": (JOB, EDITED, {}, RUNNING, True),
        "no edit that isn't accepted": (JOB, EDITED, {"held": True}, RUNNING, False),
        "no suspension": (JOB, jobset(suspended=True), {}, EVICTED, False),
        "another queue": (MOVED, jobset(MOVED, suspended=True), {}, EVICTED, True),
        "no queue while it runs down": (MOVED, jobset(MOVED, suspended=True), {}, RUNNING, False),
        "no queue while it runs": (MOVED, jobset(MOVED), {}, EVICTED, False),
        "other machines": (TPU_JOB, OTHERS, ON, EVICTED, True),
        "none while it runs": (TPU_JOB, replace(OTHERS, suspended=False), ON, EVICTED, False),
        "not the same machines": (
            TPU_JOB,
            replace(OTHERS, machines_hash=machines_hash(READY)),
            ON,
            EVICTED,
            False,
        ),
        "none that aren't ready": (
            TPU_JOB,
            OTHERS,
            {"machines": replace(READY, joined=False)},
            EVICTED,
            False,
        ),
        "no edit without machines": (TPU_JOB, replace(OTHERS, template_hash="another"), {}, EVICTED, False),
    },
)
def test_a_jobset_is_replaced_for(
    job: CheckpointedTrainingJob, of: JobSet, observed: dict[str, Any], attempt: Attempt, *, changed: bool
) -> None:
    view = make_view(job, Observed(**observed))
    assert (find_change(view, of, history(attempt)) is not None) is changed


def make(known: JobHistory, job: CheckpointedTrainingJob = JOB, **observed: Any) -> Plan:
    return plan_without_jobset(make_view(job, Observed(**observed)), known)


def test_a_jobset_gets_a_number_of_its_own() -> None:
    assert make(history(job_sets=0, started=False)).history.operator.job_sets == 1
    known = history(EVICTED, restarts_seen=3, counted_restarts_seen=2, resumed_at=950)
    assert make(known).history.operator == known.operator, "the number was not used yet"
    made = make_job(status={"resources": {"jobSet": {"name": "lm", "uid": "s"}}})
    next_one = OperatorState(job_sets=2)
    assert make(known, made).history.operator == next_one
    assert make(known, evidence=(AttemptEvidence(ordinal=(0, 2)),)).history.operator == next_one
    waiting = make(history(EVICTED), STOPPED)
    assert (waiting.actions, waiting.waiting) == ((), "the job is suspended")


BEGUN: Final = history(FAILED, SECOND, failures=1)
TWICE: Final = history(FAILED, SECOND, failures=2)
FATAL_BEGUN: Final = history(FATAL, SECOND, failures=1)


@table(
    "job, known, pods, message",
    {
        "not before JobSet acts": (NONE_LEFT, history(FAILED), (ended(1),), None),
        "at once if it is fatal": (NONE_LEFT, history(FATAL), (ended(1),), "exit 1"),
        "with a restart that JobSet began": (NONE_LEFT, BEGUN, (), NOT_ALLOWED),
        "with one whose cause was corrected": (recorded(EVICTED, SECOND), TWICE, (), NOT_ALLOWED),
        "not with one that is allowed": (ONE_LEFT, BEGUN, (), None),
        "not by an edited budget": (recorded(FAILED, SECOND, max_failures=0), BEGUN, (), None),
        "not by a guess that proved right": (recorded(GUESSED, SECOND, max_failures=0), BEGUN, (), None),
        "with a fatal code before it": (NONE_LEFT, FATAL_BEGUN, (), NOT_ALLOWED),
        "not by edited fatal codes": (recorded(FAILED, SECOND), FATAL_BEGUN, (), None),
    },
)
def test_the_job_ends(
    job: CheckpointedTrainingJob, known: JobHistory, pods: tuple[Pod, ...], message: str | None
) -> None:
    found = plan(known, seen(*pods), job)
    assert (found.end is not None) is (message is not None)
    assert message is None or found.history.attempts[-1].message == message


def on_machines(attempt: Attempt, of: dict[str, Any] | None = None, **more: Any) -> Plan:
    machines = make_machines(**more)
    base = {"template_hash": template_hash(TPU_JOB, machines), "machines_hash": machines_hash(machines)}
    return plan(history(attempt), seen(jobset=make_jobset(**(base | (of or {}))), machines=machines), TPU_JOB)


def name_of(action: object) -> str:
    if isinstance(action, SetSuspend):
        return "stop" if action.suspend else "resume"
    return "delete" if isinstance(action, DeleteJobSet) else "make"


SHORT: Final = make_job(restarts={"backoff": {"initialSeconds": 46, "maxSeconds": 1000}})
WAITED: Final = history(EVICTED, next_start_time=980, starts_without_checkpoint=3)
OVER: Final = history(RUNNING, starts_without_checkpoint=3)
HELD_IDLE: Final = seen(jobset=jobset(**IDLE), held=True)
BACKED_OFF: Final = make_job(restarts={"backoff": MINUTE})


@table(
    "found, action, said",
    {
        "its machines are there": (on_machines(RUNNING), None, None),
        "they are lost": (on_machines(RUNNING, active=False), "stop", "QueuedResource tpu"),
        "a host left": (on_machines(RUNNING, joined=False), None, None),
        "a host has to join": (on_machines(EVICTED, IDLE, joined=False), None, "to join"),
        "they are back": (on_machines(EVICTED, IDLE), "resume", None),
        "they are lost in a queue": (on_machines(RUNNING, QUEUED, active=False), "delete", "tpu"),
        "a host left in a queue": (on_machines(RUNNING, QUEUED, joined=False), None, None),
        "it may start": (plan(history(EVICTED), seen(jobset=jobset(**IDLE))), "resume", None),
        "it isn't accepted": (plan(history(EVICTED), HELD_IDLE), None, ""),
        "it was accepted, its back-off is over": (plan(WAITED, HELD_IDLE, SHORT), "resume", None),
        "its user stops it": (plan(history(RUNNING), seen(held=True), STOPPED), "stop", ""),
        "it is Kueue's to start": (plan(history(EVICTED), seen(jobset=jobset(**IDLE, **QUEUED))), None, ""),
        "it leaves its queue": (plan(history(RUNNING), seen(jobset=jobset(**QUEUED)), STOPPED), "delete", ""),
        "JobSet doesn't wait": (plan(history(FAILED), seen(ended(1), ended(75, 1)), BACKED_OFF), "stop", ""),
        "it had too many starts": (plan(OVER, seen(), FEW), "stop", ""),
        "reports are due": (plan(OVER, seen(operator_started_at=NOW - 20), FEW), None, None),
    },
)
def test_what_runs_is_stopped_resumed_or_left_when(found: Plan, action: str | None, said: str | None) -> None:
    assert [name_of(each) for each in found.actions] == ([] if action is None else [action])
    assert said == "" or (found.waiting is None) is (said is None)
    assert (said or "") in (found.waiting or "")


def test_more_starts_than_are_allowed_are_looked_at_again_when_reports_are_due() -> None:
    assert plan(OVER, seen(operator_started_at=NOW - 20), FEW).look_again_s == 40
