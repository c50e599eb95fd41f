"""The status of a CheckpointedTrainingJob: a mirror for people, and what the operator has to know after its restart."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from stepkeeper_operator.api.base import StatusPart, Timestamp, map_by

__all__ = [
    "MAX_ATTEMPTS",
    "MAX_METRICS",
    "MAX_RECENT",
    "Attempt",
    "Bookkeeping",
    "CauseCount",
    "CheckpointStatus",
    "CommitStatus",
    "Condition",
    "ConditionStatus",
    "ConditionType",
    "JobSetRef",
    "Metric",
    "Phase",
    "ProgressStatus",
    "ResourcesStatus",
    "RestartsStatus",
    "RestoredStatus",
    "TrainingJobStatus",
]

MAX_ATTEMPTS = 10
MAX_METRICS = 16
MAX_RECENT = 10

Step = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class Phase(StrEnum):
    """One word for the conditions, for the column; conditions say why."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


class ConditionType(StrEnum):
    ACCEPTED = "Accepted"
    """The spec is one that can be run."""

    RUNNING = "Running"
    """All pods of the current attempt run."""

    REPORTING = "Reporting"
    """The job's reports arrive. False names the likely reasons; it is never by itself a ground for a restart."""

    SUSPENDED = "Suspended"
    """Nothing of the job runs, because it was asked for or because a bound was reached."""

    COMPLETE = "Complete"
    """Every pod exited 0."""

    FAILED = "Failed"
    """The job ended and is not started again."""


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(StatusPart):
    type: Annotated[str, Field(min_length=1, max_length=64)]
    """Accepted, Running, Reporting, Suspended, Complete or Failed."""

    status: ConditionStatus
    """True, False or Unknown."""

    reason: Annotated[str, Field(min_length=1, max_length=128)]
    """One word for why."""

    message: Annotated[str, Field(max_length=2048)] = ""
    """Why, and what to do about it."""

    last_transition_time: Timestamp
    """When status changed last."""

    observed_generation: Count | None = None
    """The generation of the spec that this was found for."""


class CommitStatus(StatusPart):
    """One committed checkpoint."""

    sequence: Count
    """Slot of the commit in the storage log: grows with each commit, whatever its step."""

    step: Step
    """Last step that the checkpoint holds."""

    uri: Annotated[str, Field(max_length=2048)]
    """Folder of the checkpoint."""

    time: Timestamp | None = None
    """When it was committed, by the clock of the pod."""

    size_bytes: Count | None = None
    """Bytes over all hosts."""

    duration_millis: Count | None = None
    """From the snapshot to the commit."""


class RestoredStatus(StatusPart):
    """What an attempt resumed from."""

    sequence: Count
    """Slot of the commit in the storage log."""

    step: Step
    """Its step."""


class CheckpointStatus(StatusPart):
    latest: CommitStatus | None = None
    """The commit that the next attempt resumes from."""

    in_flight_step: Step | None = None
    """Step of the save that is under way."""

    restored: RestoredStatus | None = None
    """What the current attempt resumed from. Unset: it started from scratch, or hasn't said yet."""

    recent: Annotated[tuple[CommitStatus, ...], Field(max_length=MAX_RECENT)] = ()
    """The newest commits that were reported, oldest first."""

    root: Annotated[str, Field(max_length=64)] | None = None
    """Which storage log this is from: the nonce of its first entry."""

    tail: Count | None = None
    """Highest slot of that log that was reported. latest changes only when this grows or root is another."""


class Attempt(StatusPart):
    """One start of all hosts together."""

    number: Count
    """Counts the job's starts from 1."""

    start: Timestamp
    """When its pods were made."""

    end: Timestamp | None = None
    """When it ended. Unset: it is the current one."""

    cause: Annotated[str, Field(max_length=64)] | None = None
    """Why it ended: ApplicationError, SpotPreemption, NodeFailure, … It can still change for two minutes."""

    from_step: Step | None = None
    """Step of the checkpoint that it resumed from. Unset: it started from scratch, or hasn't said."""

    to_step: Step | None = None
    """Last step that it was heard to have finished."""

    node: Annotated[str, Field(max_length=253)] | None = None
    """The node where its end began."""

    message: Annotated[str, Field(max_length=1024)] | None = None
    """What was seen of its end."""


class CauseCount(StatusPart):
    cause: Annotated[str, Field(max_length=64)]
    """Cause of attempts that ended."""

    count: Count
    """Restarts for it in the job's whole life."""

    counted_towards_limit: Count = 0
    """How many of them count towards the limit of their kind now: a new checkpoint can set failures back to 0. Always 0
    where there is no limit."""


class RestartsStatus(StatusPart):
    total: Count = 0
    """Restarts in the job's whole life."""

    by_cause: Annotated[tuple[CauseCount, ...], Field(max_length=32)] = ()
    """The same by cause."""


class Metric(StatusPart):
    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name, as the training code gave it."""

    value: Annotated[str, Field(max_length=64)]
    """Its newest value, as text."""


class ProgressStatus(StatusPart):
    """How far the training is; written at most once a minute."""

    step: Step | None = None
    """Last finished step."""

    percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """Of totalSteps."""

    eta_seconds: Count | None = None
    """Time to totalSteps at the present speed, without disruptions."""

    step_millis: Count | None = None
    """Duration of a step."""

    last_progress_time: Timestamp | None = None
    """When the step was last heard to have grown."""

    slowest_rank: Count | None = None
    """The host that is furthest behind."""

    metrics: Annotated[tuple[Metric, ...], Field(max_length=MAX_METRICS)] = ()
    """What the training code reports, e.g. the loss."""


class JobSetRef(StatusPart):
    name: Annotated[str, Field(max_length=63)]
    """Its name."""

    uid: Annotated[str, Field(max_length=64)]
    """Its uid."""


class ResourcesStatus(StatusPart):
    chips: Count = 0
    """TPU chips over all slices."""

    hosts: Count = 0
    """Hosts over all slices."""

    job_set: JobSetRef | None = None
    """The JobSet that runs the job now."""


class Bookkeeping(StatusPart):
    """What the operator has to know after its own restart and can't see in the cluster. For no one else."""

    job_sets: Count = 0
    """JobSets made so far; the current one's number is this minus 1."""

    started: bool = False
    """The current JobSet had an attempt."""

    restarts_seen: Count = 0
    """Restarts of the current JobSet that attempts already account for."""

    counted_restarts_seen: Count = 0
    """Those of them that JobSet counted towards its own limit."""

    not_before: Timestamp | None = None
    """The next JobSet is made no sooner: the back-off after a failure."""

    unexplained: Count = 0
    """Restarts in a row without evidence of their cause and without a commit."""


class TrainingJobStatus(StatusPart):
    """What became of the job."""

    observed_generation: Count | None = None
    """The generation of the spec that this is about."""

    phase: Phase | None = None
    """One word for the conditions."""

    conditions: Annotated[tuple[Condition, ...], Field(max_length=16, json_schema_extra=map_by("type"))] = ()
    """What is true of the job, and why."""

    checkpoint: CheckpointStatus | None = None
    """Committed checkpoints, as last reported."""

    attempts: Annotated[tuple[Attempt, ...], Field(max_length=MAX_ATTEMPTS)] = ()
    """The newest starts of the job, oldest first: when, why they ended, from which step to which."""

    restarts: RestartsStatus = RestartsStatus()
    """How often the job was started again, and why."""

    progress: ProgressStatus | None = None
    """How far the training is."""

    resources: ResourcesStatus | None = None
    """What the job is made of in the cluster."""

    bookkeeping: Bookkeeping = Bookkeeping()
    """The operator's own notes."""
