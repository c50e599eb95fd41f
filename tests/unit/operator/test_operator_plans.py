"""Test what is planned next: the job's end, a new JobSet, a stop or a wait."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from fake_cluster.facts import ON_MACHINES, make_job, make_jobset, make_machines, make_view
from fake_cluster.facts import make_ended_pod as ended
from fake_cluster.facts import make_history as history
from fake_cluster.facts import make_observed as seen
from fake_cluster.facts import make_unedited_jobset as jobset
from fake_cluster.stories import table
from stepkeeper.contract import Termination
from stepkeeper_operator.api.v1alpha1.reasons import Reason
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import Attempt, OperatorState
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts.jobset import JobSet
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.training_jobs.attempts.ends import NOT_ALLOWED
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.build.jobset import machines_hash, template_hash
from stepkeeper_operator.training_jobs.decision import DeleteJobSet, JobEnd, SetSuspend
from stepkeeper_operator.training_jobs.observed import Observed
from stepkeeper_operator.training_jobs.policy.machines import find_wait
from stepkeeper_operator.training_jobs.policy.next_step import find_change, plan_next, plan_without_jobset
from stepkeeper_operator.training_jobs.policy.plan import Plan
from stepkeeper_operator.training_jobs.policy.starts import explain_limit

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
        "no edit that isn't accepted": (JOB, EDITED, {"accepted": False}, RUNNING, False),
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
HELD_IDLE: Final = seen(jobset=jobset(**IDLE), accepted=False)
BACKED_OFF: Final = make_job(restarts={"backoff": MINUTE})


@table(
    "find, action, said",
    {
        "its machines are there": (lambda: on_machines(RUNNING), None, None),
        "they are lost": (lambda: on_machines(RUNNING, active=False), "stop", "QueuedResource tpu"),
        "a host left": (lambda: on_machines(RUNNING, joined=False), None, None),
        "a host has to join": (lambda: on_machines(EVICTED, IDLE, joined=False), None, "to join"),
        "they are back": (lambda: on_machines(EVICTED, IDLE), "resume", None),
        "they are lost in a queue": (lambda: on_machines(RUNNING, QUEUED, active=False), "delete", "tpu"),
        "a host left in a queue": (lambda: on_machines(RUNNING, QUEUED, joined=False), None, None),
        "it may start": (lambda: plan(history(EVICTED), seen(jobset=jobset(**IDLE))), "resume", None),
        "it isn't accepted": (lambda: plan(history(EVICTED), HELD_IDLE), None, ""),
        "it was accepted, its back-off is over": (lambda: plan(WAITED, HELD_IDLE, SHORT), "resume", None),
        "its user stops it": (lambda: plan(history(RUNNING), seen(accepted=False), STOPPED), "stop", ""),
        "it is Kueue's to start": (
            lambda: plan(history(EVICTED), seen(jobset=jobset(**IDLE, **QUEUED))),
            None,
            "",
        ),
        "it leaves its queue": (
            lambda: plan(history(RUNNING), seen(jobset=jobset(**QUEUED)), STOPPED),
            "delete",
            "",
        ),
        "JobSet doesn't wait": (
            lambda: plan(history(FAILED), seen(ended(1), ended(75, 1)), BACKED_OFF),
            "stop",
            "",
        ),
        "it had too many starts": (lambda: plan(OVER, seen(), FEW), "stop", ""),
        "reports are due": (lambda: plan(OVER, seen(operator_started_at=NOW - 20), FEW), None, None),
    },
)
def test_what_runs_is_stopped_resumed_or_left_when(
    find: Callable[[], Plan], action: str | None, said: str | None
) -> None:
    found = find()
    assert [name_of(each) for each in found.actions] == ([] if action is None else [action])
    assert said == "" or (found.waiting is None) is (said is None)
    assert (said or "") in (found.waiting or "")


def test_more_starts_than_are_allowed_are_looked_at_again_when_reports_are_due() -> None:
    assert plan(OVER, seen(operator_started_at=NOW - 20), FEW).look_again_s == 40


AFTER_NOTICE: Final = ENDED.model_copy(update={"kind": "Stopped", "cause": "Requested"})
COMPLETED: Final = jobset(completed=True)
HIDDEN: Final = replace(ended(0), termination=Termination(code=1))
STOPPED_WITH_0: Final = replace(ended(0), deadline=420.0)
TEN_STEPS: Final = make_job(totalSteps=10)


def at_step(step: int) -> JobHistory:
    return history(AFTER_NOTICE.model_copy(update={"to_step": step}))


@table(
    "known, observed, job, action, said",
    {
        "it is made": (history(), Observed(), JOB, "make", "its JobSet is being created"),
        "it is edited": (
            history(RUNNING),
            seen(jobset=EDITED),
            JOB,
            "delete",
            "spec.template or spec.placement was changed",
        ),
        "it is deleted": (
            history(RUNNING),
            seen(jobset=jobset(deleting=True)),
            JOB,
            None,
            "the old JobSet's pods are still stopping",
        ),
        "JobSet gave up": (
            history(EVICTED),
            seen(jobset=jobset(failure_reason="x")),
            JOB,
            "delete",
            "its JobSet is being replaced",
        ),
        "all saved and exited 0": (
            at_step(9),
            seen(jobset=COMPLETED),
            TEN_STEPS,
            "delete",
            "all pods exited 0 at step 9 of 10 after a notice; the job is restarted",
        ),
        "all exited 0 after the last step": (at_step(10), seen(jobset=COMPLETED), TEN_STEPS, None, None),
        "all saved and exited 0 at an unknown step": (
            history(AFTER_NOTICE),
            seen(STOPPED_WITH_0, jobset=COMPLETED),
            TEN_STEPS,
            "delete",
            "all pods exited 0 after a notice; the job is restarted",
        ),
        "all exited 0 at an unknown step": (
            history(AFTER_NOTICE),
            seen(ended(0), jobset=COMPLETED),
            TEN_STEPS,
            None,
            None,
        ),
        "a shell hid an exit code": (
            history(FAILED),
            seen(HIDDEN, ended(0, 1)),
            JOB,
            "delete",
            "its JobSet is being replaced",
        ),
        "JobSet acts on another pod": (history(FAILED), seen(HIDDEN, ended(1, 1)), JOB, None, None),
        "a hidden exit code ends what is stopped": (
            history(AFTER_NOTICE),
            seen(HIDDEN, ended(0, 1)),
            JOB,
            None,
            None,
        ),
    },
)
def test_a_jobset_is_made_kept_or_replaced_when(
    known: JobHistory, observed: Observed, job: CheckpointedTrainingJob, action: str | None, said: str | None
) -> None:
    found = plan(known, observed, job)
    assert [name_of(each) for each in found.actions] == ([] if action is None else [action])
    assert found.waiting == said


FAILED_JOBSET: Final = jobset(failure_reason="FailedJobs")
FENCED_END: Final = FAILED.model_copy(update={"cause": "Fenced", "message": "job lm-2 has the root"})


@table(
    "known, observed, complete, reason, said",
    {
        "all pods exited 0": (
            history(ENDED),
            seen(ended(0), jobset=COMPLETED),
            True,
            Reason.ALL_PODS_SUCCEEDED,
            "every pod exited 0",
        ),
        "no failure is left": (
            history(FAILED),
            seen(ended(1), jobset=FAILED_JOBSET),
            False,
            Reason.MAX_FAILURES_REACHED,
            (
                "0 restarts after application failures are allowed without a new checkpoint "
                "(spec.restarts.maxFailures), and the application failed again. The last end: exit 1. "
                "Fix the cause, then delete and create this job again: it resumes from the latest commit"
            ),
        ),
        "another job has the root": (
            history(FENCED_END),
            seen(ended(77), jobset=FAILED_JOBSET),
            False,
            Reason.ROOT_OWNED_BY_ANOTHER,
            (
                "job lm-2 has the root. This job has written nothing since. End the other job, or give one of them "
                "another checkpoint.uri, then delete and create this job again"
            ),
        ),
    },
)
def test_an_end_of_the_job_is_explained_when(
    known: JobHistory, observed: Observed, complete: bool, reason: Reason, said: str
) -> None:
    end = plan(known, observed, NONE_LEFT).end
    assert end == JobEnd(complete=complete, reason=reason, message=said)


def test_a_job_whose_starts_commit_nothing_is_explained() -> None:
    text = (
        " committed no new checkpoint; spec.restarts.maxStartsWithoutCheckpoint allows 2. The last ended by Eviction: "
        "drained. Fix the cause. To start the job again, change spec.template, set spec.suspend to true and back to "
        "false, or raise maxStartsWithoutCheckpoint"
    )
    once, often = (history(EVICTED, starts_without_checkpoint=n_starts) for n_starts in (1, 3))
    assert explain_limit(FEW, once) == f"1 start has{text}"
    assert explain_limit(FEW, often) == f"3 starts in a row have{text}"


@table(
    "more, said",
    {
        "it does not exist": (
            None,
            "QueuedResource tpu does not exist in namespace default: create it there",
        ),
        "it is deleted": (
            {"deleting": True},
            "QueuedResource tpu is being deleted; the job resumes on a new",
        ),
        "it isn't active": (
            {"active": False, "state": "Accepted"},
            "the job starts when QueuedResource tpu is Active; its state is Accepted: its machines do not exist yet",
        ),
        "hosts are late": (
            {"joined": False, "join_timed_out": True, "obstacle": "h1"},
            "the hosts of QueuedResource tpu have not joined the cluster in time: h1",
        ),
        "no host is known": (
            {"joined": False, "join_deadline": 0},
            (
                "waiting for the hosts of QueuedResource tpu to join the cluster (deadline 1970-01-01T00:00:00Z): "
                "no host is known yet"
            ),
        ),
    },
)
def test_a_job_waits_for_its_machines_while(more: dict[str, Any] | None, said: str) -> None:
    machines = None if more is None else make_machines(**more)
    wait = find_wait(make_view(TPU_JOB, Observed(machines=machines)))
    assert wait is not None
    assert wait.message.startswith(said)


def test_a_job_that_needs_queued_resources_says_how_to_turn_them_on() -> None:
    wait = find_wait(make_view(TPU_JOB, Observed(queued_resources_managed=False)))
    assert wait is not None
    assert wait.message.endswith("install the chart with cloudTPU.enabled=true")
