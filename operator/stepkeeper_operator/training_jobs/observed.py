"""Define the input of a decision about one job: the observed facts, and what this process remembers of the job.

A restart loses the memory, which costs only a few requests. An ordinal names the pods of an attempt: the number of
their JobSet, and how often JobSet had restarted it before.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from stepkeeper_operator.api.v1alpha1.conditions import END_CONDITIONS, ConditionStatus
from stepkeeper_operator.api.v1alpha1.trainingjob import CheckpointedTrainingJob
from stepkeeper_operator.cache.evidence import AttemptEvidence
from stepkeeper_operator.cache.reports import LastReport, TrainerStatus
from stepkeeper_operator.facts.checkpoint_root import JobRoot
from stepkeeper_operator.facts.jobset import ConfigMap, JobSet, Workload
from stepkeeper_operator.facts.node import Node
from stepkeeper_operator.facts.pod import Pod
from stepkeeper_operator.facts.queued_resource import MachinesUser, QueuedMachines
from stepkeeper_operator.settings import OperatorSettings

__all__ = [
    "JOBSET_RECHECK_S",
    "REJECTION_RETRY_S",
    "JobMemory",
    "Leftover",
    "Memory",
    "Observed",
    "Rejection",
    "View",
    "compute_recheck_s",
    "find_end",
]

JOBSET_RECHECK_S: Final = 5.0
"""Seconds for which the cached state of an awaited JobSet is trusted at first."""

_MAX_RECHECK_S: Final = 60.0
_RECHECK_SHARE: Final = 0.25
"""The share of the time since the attempt's end for which that state is trusted later."""

REJECTION_RETRY_S: Final = 60.0
"""Seconds until the creation of a refused JobSet is retried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """The API server's refusal of a write for a job."""

    generation: int
    """Generation of the job from which the refused write was built."""

    status: int
    """HTTP status of the answer."""

    message: str
    at: float
    since: float
    """Unix time of the first of the consecutive refusals."""

    reportable: bool
    """True if users should see it: it lasts until something is changed, or has lasted for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """An object of an earlier JobSet, or of a deleted job of this name, that exists while the job has no JobSet."""

    name: str
    """Kind and name of one such object."""

    origin: str = "an earlier JobSet"
    """The owner of the object, for messages."""

    terminating: tuple[Pod, ...] = ()
    """Terminating pods whose Job is gone, or of a deleted job. On a lost node they never end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The cluster around one job at one moment."""

    jobset: JobSet | None = None
    """The JobSet with the job's name, of any owner."""

    workload: Workload | None = None
    """Kueue's Workload of the JobSet, if there is one."""

    pods: tuple[Pod, ...] = ()
    """The remaining pods of all attempts."""

    saved_stacks: Mapping[str, Any] | None = None
    """The ConfigMap of stacks that this operator process wrote last for the job."""

    leftover: Leftover | None = None
    """Set only if there is no JobSet."""

    evidence: tuple[AttemptEvidence, ...] = ()
    """The last known states of the pods and failed Jobs of the newest attempts, by ordinal."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    """The nodes that pods in `pods` and `evidence` were on, by name."""

    n_nodes: int = 0
    n_unknown_nodes: int = 0
    """Both counts cover the whole cluster."""

    report: LastReport | None = None
    trainer_status: TrainerStatus | None = None
    config_map: ConfigMap | None = None
    ca_pem: str = ""
    rejection: Rejection | None = None
    """The refusal of the JobSet's creation. Set only if it was built from the current generation."""

    rejections: Mapping[str, Rejection] = field(default_factory=dict)
    """The reportable refusals by the action's name: `rejection`, and those of all other writes."""

    has_acted: bool = True
    """False if this operator process has applied no decision about the job, so it has seen no refusals."""

    unreadable: tuple[str, ...] = ()
    """Path and reason of each part of the spec that this operator cannot read. The job lacks these parts."""

    root_rivals: tuple[JobRoot, ...] = ()
    """The other jobs of the cluster whose root is the same as this job's, inside it, or contains it."""

    accepted: bool = True
    """False if condition Accepted is False: then running pods continue, and nothing starts but `kept_jobset`."""

    kept_jobset: str | None = None
    """The JobSet of the last accepted spec. Set only if the present one can't be read, and nothing else is wrong."""

    failed_probes: Mapping[str, str] = field(default_factory=dict)
    """The container and the probe that ended it, by the uid of an ended pod."""

    probes_look_s: float | None = None
    """Seconds until late events are to be looked for; None if none are missing."""

    machines: QueuedMachines | None = None
    """The QueuedResource that the job names; None if it names none, or the resource does not exist."""

    machines_users: tuple[MachinesUser, ...] = ()
    """The other jobs that name it."""

    queued_resources_managed: bool = True
    """False if QueuedResources are disabled in this operator."""

    operator_started_at: float = 0.0
    last_write_at: float = 0.0
    """Unix time when this operator last wrote the job's status."""

    @property
    def may_start(self) -> bool:
        """True if there is an accepted spec to start pods from."""
        return self.accepted or self.kept_jobset is not None

    @property
    def is_queued(self) -> bool:
        """True if Kueue manages the JobSet: then only Kueue resumes it, or stops it for others.

        Only the JobSet and its Workload show this: Kueue's webhook may set a queue that the job does not name.
        """
        return self.jobset is not None and (self.jobset.is_queued or self.workload is not None)

    def find_eviction(self, job: CheckpointedTrainingJob) -> str | None:
        """Return why Kueue has suspended the JobSet; None if it has not."""
        if self.jobset is None or not self.is_queued or not self.jobset.suspend or job.spec.suspend:
            return None
        evicted = None if self.workload is None else self.workload.eviction
        return "Kueue suspended it" if evicted is None else f"Kueue evicted it ({evicted})"

    def find_evidence(self, ordinal: tuple[int, int]) -> AttemptEvidence | None:
        """Find the evidence with that ordinal. The attempts before and after a suspension share it."""
        return next((evidence for evidence in self.evidence if evidence.ordinal == ordinal), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A job, the observed cluster around it, and the time: the input of every rule."""

    job: CheckpointedTrainingJob
    observed: Observed
    settings: OperatorSettings
    now: float

    @property
    def jobset(self) -> JobSet | None:
        return self.observed.jobset

    @property
    def machines(self) -> QueuedMachines | None:
        return self.observed.machines

    @property
    def n_hosts(self) -> int:
        """The number of hosts in the JobSet, else in the spec. They differ after an edit that is not accepted."""
        in_jobset = 0 if self.jobset is None else self.jobset.n_pods  # 0 is also a JobSet's unknown number
        return in_jobset or self.job.spec.placement.n_hosts

    @property
    def is_on_queued_resource(self) -> bool:
        """True if the job names a QueuedResource."""
        return self.job.spec.placement.queued_resource_name is not None


def compute_recheck_s(job: CheckpointedTrainingJob, jobset: JobSet, *, now: float) -> float | None:
    """Compute for how many seconds the cached JobSet is trusted without a watch event; None: without limit.

    There is a limit only while the job waits for JobSet to act: no attempt runs, the JobSet is not suspended, and no
    back-off delays the next start. The limit grows with the time since the attempt's end.
    """
    attempts, next_at = job.status.attempts, job.status.next_start_time
    if not attempts or jobset.suspend:
        return None
    ended_at = attempts[-1].end
    if ended_at is None or (jobset.is_finished and next_at is not None and now < next_at):
        return None
    return min(_MAX_RECHECK_S, max(JOBSET_RECHECK_S, (now - ended_at) * _RECHECK_SHARE))


def find_end(job: CheckpointedTrainingJob) -> int | None:
    """Find the Unix time at which the job ended; None if it has not ended."""
    ends = (c for c in job.status.conditions if c.type in END_CONDITIONS and c.status is ConditionStatus.TRUE)
    return next((end.last_transition_time for end in ends), None)


@dataclass(slots=True)
class JobMemory:
    last_write_at: float = 0.0
    config_map: ConfigMap | None = None
    config_map_read_at: float = float("-inf")
    jobset_read_at: float = float("-inf")
    foreign_suspended_jobset: str | None = None
    """Uid of the JobSet that another controller, such as Kueue, suspended at its creation."""

    failed_probes: dict[str, str] = field(default_factory=dict)
    """What events name as the container and the probe that ended a pod, by its uid; empty if no probe ended it."""

    probes_read_at: float = float("-inf")

    recovery: tuple[int, float] | None = None
    """Number of the last attempt that recovered after another one's end, and the seconds that it took."""
    saved_stacks: Mapping[str, Any] | None = None
    """The newest ConfigMap of stacks."""

    has_acted: bool = False
    """True once a decision was applied. Until then it is unknown which writes the API server refuses."""

    rejections: dict[str, Rejection] = field(default_factory=dict)
    """The refusals of the last actions, by the action's name."""

    unwritten: Rejection | None = None
    """The refusal of the last status."""

    def note_foreign_suspension(self, jobset: JobSet) -> None:
        """Remember a JobSet that another controller suspended at its creation: only generation 1 of it shows that."""
        if jobset.created_suspended:
            self.foreign_suspended_jobset = jobset.uid


@dataclass(slots=True)
class Memory:
    """The memory of all jobs, by uid."""

    started_at: float
    jobs: dict[str, JobMemory] = field(default_factory=dict)

    def get_job(self, job_uid: str) -> JobMemory:
        return self.jobs.setdefault(job_uid, JobMemory())

    def forget_job(self, job_uid: str) -> None:
        self.jobs.pop(job_uid, None)
