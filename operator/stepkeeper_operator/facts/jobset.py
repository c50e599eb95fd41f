"""Read the objects that run a job: its JobSet, that JobSet's Jobs, its Kueue Workload, and its ConfigMap."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepkeeper_operator.facts.raw import (
    RawObject,
    condition_of,
    controller_of,
    controller_uid,
    controlling_job,
    ordinal_of,
    parse_time,
)
from stepkeeper_operator.labels import (
    JOB_UID_LABEL,
    JOBSET_NUMBER_LABEL,
    KUEUE_PREFIX,
    MACHINES_HASH_ANNOTATION,
    QUEUE_LABEL,
    TEMPLATE_HASH_ANNOTATION,
)

__all__ = [
    "BatchJob",
    "ConfigMap",
    "JobSet",
    "Workload",
    "read_batch_job",
    "read_config_map",
    "read_jobset",
    "read_workload",
]

_RULE_PREFIX = "FailurePolicy_"
_KUEUE_MESSAGE_LIMIT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSet:
    """Identity, restarts and terminal state of a JobSet."""

    namespace: str
    name: str
    uid: str
    job_uid: str
    owner_uid: str | None
    owner_job: str | None
    """Name of the training job that controls it; an earlier job can have had the same name."""

    number: int
    template_hash: str
    machines_hash: str
    """Empty where the job names no QueuedResource."""

    suspend: bool
    """True if its spec asks for suspension."""

    created_suspended: bool
    """True if its first generation has suspend: true, which the operator never sets: another controller did.

    Later generations don't show this, so it is False for them: `observe` remembers it."""

    suspended: bool
    """True if it is suspended."""

    resumed_at: float | None
    """Unix time of the end of its last suspension."""

    restarts: int
    restarts_counted: int
    """Restarts that count towards maxRestarts: those that JobSet treats as failures of the application."""

    rule: str | None
    """Name of the failure-policy rule of the last restart."""

    completed: bool
    failure_reason: str | None
    failure_message: str
    deleting: bool
    n_pods: int = 0
    """Pods that its Jobs make. 0: unknown."""

    queue_labels: Mapping[str, str] = field(default_factory=dict)
    """Its labels for Kueue."""

    managed_by: str = ""
    """Name of the controller that runs it, where that isn't JobSet's own."""

    @property
    def is_queued(self) -> bool:
        """True if the JobSet itself shows that Kueue manages it, which also suspends JobSets without a queue label."""
        named = QUEUE_LABEL in self.queue_labels or self.managed_by.startswith(KUEUE_PREFIX)
        return named or self.created_suspended

    @property
    def ordinal(self) -> tuple[int, int]:
        """The ordinal of its present or next attempt: the JobSet's number and its restarts so far."""
        return (self.number, self.restarts)

    @property
    def is_finished(self) -> bool:
        return self.completed or self.failure_reason is not None

    def lacks_labels(self, wanted: Mapping[str, str]) -> bool:
        """Return True if a wanted label for Kueue is absent, or has another value."""
        return any(self.queue_labels.get(key) != value for key, value in wanted.items())


def read_jobset(raw: RawObject) -> JobSet:
    """Read the facts of a JobSet object."""
    meta, spec, status = raw["metadata"], raw.get("spec", {}), raw.get("status", {})
    labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
    failed, suspended = condition_of(raw, "Failed"), condition_of(raw, "Suspended")
    resumed = suspended.get("status") == "False"
    restarting = condition_of(raw, "RestartingJobSet").get("reason", "")
    number = labels.get(JOBSET_NUMBER_LABEL, "")
    return JobSet(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        job_uid=labels.get(JOB_UID_LABEL, ""),
        owner_uid=controller_uid(raw),
        owner_job=controlling_job(raw),
        number=int(number) if number.isdecimal() else 0,
        template_hash=annotations.get(TEMPLATE_HASH_ANNOTATION, ""),
        machines_hash=annotations.get(MACHINES_HASH_ANNOTATION, ""),
        suspend=bool(spec.get("suspend")),
        created_suspended=bool(spec.get("suspend")) and meta.get("generation") == 1,
        suspended=suspended.get("status") == "True",
        resumed_at=parse_time(suspended.get("lastTransitionTime")) if resumed else None,
        restarts=status.get("restarts", 0),
        restarts_counted=status.get("restartsCountTowardsMax", 0),
        rule=restarting.removeprefix(_RULE_PREFIX) if restarting.startswith(_RULE_PREFIX) else None,
        completed=condition_of(raw, "Completed").get("status") == "True",
        failure_reason=failed.get("reason") if failed.get("status") == "True" else None,
        failure_message=failed.get("message", ""),
        deleting="deletionTimestamp" in meta,
        n_pods=_count_pods(spec),
        queue_labels={key: value for key, value in labels.items() if key.startswith(KUEUE_PREFIX)},
        managed_by=spec.get("managedBy") or "",
    )


def _count_pods(spec: Mapping[str, Any]) -> int:
    return sum(
        each.get("replicas", 1) * (each.get("template", {}).get("spec", {}).get("completions") or 0)
        for each in spec.get("replicatedJobs") or ()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    namespace: str
    name: str
    uid: str
    job_uid: str
    owner_uid: str | None
    """Uid of the JobSet that controls it."""

    ordinal: tuple[int, int] | None
    """The attempt that its labels name; see `ordinal_of`."""

    failure_reason: str | None
    """Set as soon as condition FailureTarget is True, before the last pod has ended."""

    failure_message: str
    n_succeeded: int = 0
    """Pods that have exited 0, including those that had been asked to stop. The Job doesn't replace them."""


def read_batch_job(raw: RawObject) -> BatchJob:
    """Read the facts of a batch Job object."""
    meta = raw["metadata"]
    failures = (condition_of(raw, kind) for kind in ("Failed", "FailureTarget"))
    failure = next((condition for condition in failures if condition.get("status") == "True"), {})
    return BatchJob(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        job_uid=(meta.get("labels") or {}).get(JOB_UID_LABEL, ""),
        owner_uid=controller_uid(raw),
        ordinal=ordinal_of(raw),
        failure_reason=failure.get("reason"),
        failure_message=failure.get("message", ""),
        n_succeeded=raw.get("status", {}).get("succeeded") or 0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A JobSet as Kueue sees it: its quota, and its eviction."""

    namespace: str
    name: str
    uid: str
    jobset_name: str
    jobset_uid: str
    """Uid of the JobSet that owns it. Empty: none does."""

    quota_reserved: bool
    message: str
    eviction: str | None
    """Reason and message of its eviction, until it has quota again."""


def read_workload(raw: RawObject) -> Workload:
    """Read the facts of a Workload object."""
    meta = raw["metadata"]
    owner = controller_of(raw) or {}
    owned = owner.get("kind") == "JobSet"
    quota, evicted = condition_of(raw, "QuotaReserved"), condition_of(raw, "Evicted")
    eviction = f"{evicted.get('reason', '')}: {evicted.get('message', '')}"[:_KUEUE_MESSAGE_LIMIT]
    return Workload(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        jobset_name=str(owner["name"]) if owned else "",
        jobset_uid=str(owner["uid"]) if owned else "",
        quota_reserved=quota.get("status") == "True",
        message=quota.get("message", "Kueue has not processed it yet")[:_KUEUE_MESSAGE_LIMIT],
        eviction=eviction if evicted.get("status") == "True" else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigMap:
    """The ConfigMap that has the name of the job's ConfigMap, regardless of who created it."""

    owner_uid: str | None
    """Uid of the object that controls it."""

    owner_job: str | None
    """Name of the training job that controls it; an earlier job can have had the same name."""

    data: Mapping[str, str]


def read_config_map(raw: RawObject) -> ConfigMap:
    """Read the facts of a ConfigMap object."""
    return ConfigMap(
        owner_uid=controller_uid(raw), owner_job=controlling_job(raw), data=raw.get("data") or {}
    )
