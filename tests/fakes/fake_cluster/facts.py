"""Make the values that rules judge: jobs with their histories, pods, Jobs, JobSets and machines."""

from typing import Any, Final

from fake_cluster.world import training_job
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.api.v1alpha1.trainingjob_status import (
    Attempt,
    CauseCount,
    OperatorState,
    RestartsStatus,
)
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.facts.jobset import BatchJob, JobSet
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.facts.queued_resource import QueuedMachines, Slices
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.training_jobs.attempts.history import JobHistory
from stepkeeper_operator.training_jobs.build.jobset import template_hash
from stepkeeper_operator.training_jobs.observed import Observed, View

ON_MACHINES: Final[dict[str, Any]] = {
    "placement": {"tpu": {"accelerator": "v5p", "topology": "2x2x1", "queuedResourceName": "tpu"}}
}
"""The spec of a job with one host on the machines of a QueuedResource."""


def make_job(
    *, status: dict[str, Any] | None = None, labels: dict[str, str] | None = None, **spec: Any
) -> CheckpointedTrainingJob:
    """Make job lm. `spec` overrides or adds fields of the spec."""
    raw = training_job(**spec)
    meta = raw["metadata"] | {"uid": "j", "labels": labels or {}}
    return CheckpointedTrainingJob.model_validate(raw | {"metadata": meta, "status": status or {}})


def make_history(*attempts: Attempt, failures: int = 0, evictions: int = 0, **more: Any) -> JobHistory:
    """Make the history of a job that runs on its first JobSet. `more` has other noted facts."""
    counts = {"ApplicationError": failures, "Eviction": evictions}
    by_cause = tuple(
        CauseCount(cause=cause, count=n, counted_towards_limit=n if cause == "ApplicationError" else 0)
        for cause, n in counts.items()
        if n
    )
    return JobHistory(
        attempts=attempts,
        restarts=RestartsStatus(total=failures + evictions, by_cause=by_cause),
        next_start_time=more.pop("next_start_time", None),
        operator=OperatorState(**({"job_sets": 1, "started": True} | more)),
    )


def make_pod(rank: int = 0, uid: str = "", **more: Any) -> Pod:
    """Make a pod that runs, of the host with that rank. `more` replaces any of its fields."""
    base: dict[str, Any] = {
        "namespace": "default",
        "name": f"p{rank}",
        "uid": uid or f"p{rank}",
        "job_uid": "j",
        "owner_uid": "b",
        "ordinal": (0, 0),
        "rank": (0, rank),
        "created_at": 100.0,
        "node": "n1",
        "phase": "Running",
        "reason": None,
        "started": True,
        "deadline": None,
        "grace_s": 30,
        "disruption": None,
        "hang": False,
        "exit_code": None,
        "exit_reason": None,
        "finished_at": None,
        "termination": None,
        "waiting": None,
    }
    return Pod(**(base | more))


def make_ended_pod(code: int, rank: int = 0, uid: str = "", *, at: float | None = 400.0, **more: Any) -> Pod:
    phase = "Failed" if code else "Succeeded"
    return make_pod(rank, uid, **({"exit_code": code, "phase": phase, "finished_at": at} | more))


def make_failed_job(uid: str = "b", message: str = "it has reached its backoff limit") -> BatchJob:
    return BatchJob(
        namespace="default",
        name="lm-w-0",
        uid=uid,
        job_uid="j",
        owner_uid="s",
        ordinal=(0, 0),
        failure_reason="BackoffLimitExceeded",
        failure_message=message,
    )


def make_jobset(**more: Any) -> JobSet:
    """Make the first JobSet of job lm, which runs."""
    base: dict[str, Any] = {
        "namespace": "default",
        "name": "lm",
        "uid": "s",
        "job_uid": "j",
        "owner_uid": "j",
        "owner_job": "lm",
        "number": 0,
        "template_hash": "t1",
        "machines_hash": "",
        "created_suspended": False,
        "suspend": False,
        "suspended": False,
        "resumed_at": None,
        "restarts": 0,
        "restarts_counted": 0,
        "rule": None,
        "completed": False,
        "failure_reason": None,
        "failure_message": "",
        "deleting": False,
    }
    return JobSet(**(base | more))


def make_unedited_jobset(job: CheckpointedTrainingJob | None = None, **more: Any) -> JobSet:
    """Make the first JobSet of a job, by default `make_job()`, with an unchanged template."""
    return make_jobset(**({"template_hash": template_hash(job or make_job())} | more))


def make_observed(*pods: Pod, jobs: tuple[BatchJob, ...] = (), **more: Any) -> Observed:
    """Make the observed facts of a job with these pods and failed Jobs. Its template is unedited."""
    evidence = AttemptEvidence(ordinal=(0, 0), pods=pods, failed_batch_jobs=jobs)
    base: dict[str, Any] = {"evidence": (evidence,), "pods": pods, "jobset": make_unedited_jobset()}
    return Observed(**(base | more))


def make_view(job: CheckpointedTrainingJob, observed: Observed, *, now: float = 1000.0) -> View:
    """Make the input of a rule, with the operator's default settings."""
    return View(job=job, observed=observed, settings=OperatorSettings(identity="operator-1"), now=now)


def make_machines(**more: Any) -> QueuedMachines:
    """Make the machines of QueuedResource tpu, on which a job can start."""
    base: dict[str, Any] = {
        "name": "tpu",
        "namespace": "default",
        "uid": "q",
        "deleting": False,
        "spot": False,
        "best_effort": False,
        "autocheckpoint_setting": "Off",
        "slices": Slices(accelerator="v5p", topology="2x2x1", count=1),
        "active": True,
        "joined": True,
        "join_deadline": None,
        "join_timed_out": False,
        "state": "Active",
        "obstacle": "",
        "replaced": False,
    }
    return QueuedMachines(**(base | more))
