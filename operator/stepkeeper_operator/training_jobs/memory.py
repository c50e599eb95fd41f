"""Remember what this process did for each job. Losing it in a restart costs only a few requests."""

from dataclasses import dataclass, field

from stepkeeper_operator.facts.jobset import ConfigMap, JobSet

__all__ = ["JobMemory", "Memory", "Rejection"]


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
    """Unix time of the first refusal in the current row of refusals."""

    reportable: bool
    """True if users should see it: it lasts until something is changed, or has lasted for a while."""


@dataclass(slots=True)
class JobMemory:
    last_write_at: float = 0.0
    config_map: ConfigMap | None = None
    config_map_read_at: float = float("-inf")
    jobset_read_at: float = float("-inf")
    held_jobset: str | None = None
    """Uid of the JobSet that another controller suspended at its creation, and has controlled since."""

    has_acted: bool = False
    """True once a decision was applied. Until then it is unknown which writes the API server refuses."""

    rejections: dict[str, Rejection] = field(default_factory=dict)
    """The refusals of the last actions, by the action's name."""

    unwritten: Rejection | None = None
    """The refusal of the last status."""

    def note_holder(self, jobset: JobSet) -> None:
        """Note whether another controller holds the JobSet: the object shows it only until it is changed."""
        if jobset.created_suspended:
            self.held_jobset = jobset.uid


@dataclass(slots=True)
class Memory:
    """The memory of all jobs, by uid."""

    started_at: float
    jobs: dict[str, JobMemory] = field(default_factory=dict)

    def get_job(self, job_uid: str) -> JobMemory:
        return self.jobs.setdefault(job_uid, JobMemory())

    def forget_job(self, job_uid: str) -> None:
        self.jobs.pop(job_uid, None)
