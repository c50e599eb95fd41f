"""Define the status of a CheckpointedTrainingJob. Its conditions are in `conditions`.

It is a mirror for people, and it holds what the operator has to know after its own restart.
"""

from typing import Annotated

from pydantic import Field

from stepkeeper_operator.api.base import BY_TYPE, Count, StatusPart, Timestamp
from stepkeeper_operator.api.v1alpha1.conditions import MAX_CONDITIONS, Condition, Phase

__all__ = [
    "MAX_ATTEMPTS",
    "MAX_NOTICE",
    "MAX_RECENT",
    "Attempt",
    "CauseCount",
    "CheckpointStatus",
    "CommitStatus",
    "JobSetRef",
    "Metric",
    "OperatorState",
    "ProgressStatus",
    "ResourcesStatus",
    "RestartsStatus",
    "RestoredStatus",
    "SaveRequest",
    "TrainingJobStatus",
]

MAX_ATTEMPTS = 10
MAX_NOTICE = 64
_MAX_METRICS = 16
MAX_RECENT = 10

Step = Annotated[int, Field(ge=0)]


class CommitStatus(StatusPart):
    """One committed checkpoint."""

    sequence: Count
    """Slot of the commit in the storage log. It grows with each commit, whatever the step."""

    step: Step
    """Last step that the checkpoint holds."""

    uri: Annotated[str, Field(max_length=2048)]
    """Folder of the checkpoint."""

    time: Timestamp | None = None
    """Time of the commit, by the clock of the pod."""

    size_bytes: Count | None = None
    """Bytes of the checkpoint over all hosts."""

    duration_millis: Count | None = None
    """Time from the snapshot to the commit."""


class RestoredStatus(StatusPart):
    """The commit that an attempt resumed from."""

    sequence: Count
    """Slot of the commit in the storage log."""

    step: Step
    """Step of the commit."""


class SaveRequest(StatusPart):
    """A save that the operator asked the training for."""

    id: Annotated[str, Field(min_length=1, max_length=64)]
    """Name of the request. The training answers each once."""

    attempt: Count
    """Number of the attempt that was asked. The next one is asked again if it has something to lose."""

    maintenance_time: Timestamp
    """Beginning of the maintenance that the save is for."""

    time: Timestamp
    """Time when it was asked for."""

    reason: Annotated[str, Field(max_length=512)] = ""
    """Why it was asked for."""

    latest_sequence: Count | None = None
    """Slot of the newest commit at that time. Any later one answers."""

    sequence: Count | None = None
    """Slot of the commit that answered. Unset: none has."""

    step: Step | None = None
    """Step of that commit."""


class CheckpointStatus(StatusPart):
    latest: CommitStatus | None = None
    """The commit that the next attempt resumes from."""

    in_flight_step: Step | None = None
    """Step of the save that is in progress."""

    restored: RestoredStatus | None = None
    """The commit that the current attempt resumed from. Unset: it started from scratch, or has not reported yet."""

    recent: Annotated[tuple[CommitStatus, ...], Field(max_length=MAX_RECENT)] = ()
    """The newest reported commits, oldest first."""

    last_request: SaveRequest | None = None
    """The last save that the operator asked for, ahead of announced maintenance."""

    autocheckpoint: Annotated[str, Field(max_length=16)] | None = None
    """Autocheckpoint on the QueuedResource that the job names: On, Off or Mixed. With On, the cloud waits up to 300 s
    for a save before maintenance. Absent where the job names none, or there is none of that name."""

    root: Annotated[str, Field(max_length=64)] | None = None
    """Identity of the storage log that these commits are from: the nonce of its first entry."""

    tail: Count | None = None
    """Highest reported slot of that log. latest changes only when this grows or when root changes."""


class Attempt(StatusPart):
    """One start of all hosts together."""

    number: Count
    """Number of the start, counted from 1 over the job's life."""

    start: Timestamp
    """Time when its pods were made."""

    end: Timestamp | None = None
    """Time when it ended. Unset: it is the current attempt."""

    kind: Annotated[str, Field(max_length=64)] | None = None
    """Kind of its end: Completed, Failed, OverLimits, Unrecoverable, Disrupted, Requested, MachinesUnavailable,
    Suspended or Stopped. There may be more."""

    cause: Annotated[str, Field(max_length=64)] | None = None
    """Cause of its end: ApplicationError, SpotPreemption, NodeFailure, … The operator can still correct it for
    two minutes."""

    inferred: bool | None = None
    """True if nothing that was seen proves the cause."""

    from_step: Step | None = None
    """Step of the checkpoint that it resumed from. Unset: it started from scratch, or has not reported yet."""

    to_step: Step | None = None
    """Last step that it reported as finished."""

    notice: Annotated[str, Field(max_length=MAX_NOTICE)] | None = None
    """The notice that asked its pods to stop, as they reported it: sigterm, file, …"""

    node: Annotated[str, Field(max_length=253)] | None = None
    """Node where its end began."""

    message: Annotated[str, Field(max_length=1024)] | None = None
    """The evidence of its end."""

    decision: Annotated[str, Field(max_length=512)] | None = None
    """What its pods chose to save as they stopped, and why."""


class CauseCount(StatusPart):
    cause: Annotated[str, Field(max_length=64)]
    """Cause of attempts that ended."""

    count: Count
    """Restarts for this cause in the job's whole life."""

    counted_towards_limit: Count = 0
    """Number of these restarts that count towards the limit of their kind now. A new checkpoint can set
    failures back to 0. Always 0 where there is no limit."""


class RestartsStatus(StatusPart):
    total: Count = 0
    """Restarts in the job's whole life."""

    by_cause: Annotated[tuple[CauseCount, ...], Field(max_length=32)] = ()
    """The same restarts, by cause."""


class Metric(StatusPart):
    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name that the training code gave it."""

    value: Annotated[str, Field(max_length=64)]
    """Newest value, as text."""


class ProgressStatus(StatusPart):
    """Progress of the training; written at most once a minute."""

    step: Step | None = None
    """Last finished step."""

    percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """Share of totalSteps that is finished."""

    eta_seconds: Count | None = None
    """Time left to totalSteps at the present speed, without disruptions."""

    step_millis: Count | None = None
    """Duration of a step."""

    last_progress_time: Timestamp | None = None
    """Time when a report last showed a greater step."""

    longest_step_millis: Count | None = None
    """Longest time between two steps of the current attempt that reports have shown. Unset: they have shown too few."""

    slowest_rank: Count | None = None
    """The host that is furthest behind."""

    metrics: Annotated[tuple[Metric, ...], Field(max_length=_MAX_METRICS)] = ()
    """Values that the training code reports, e.g. the loss."""


class JobSetRef(StatusPart):
    name: Annotated[str, Field(max_length=63)]
    """Name of the JobSet."""

    uid: Annotated[str, Field(max_length=64)]
    """Uid of the JobSet."""


class ResourcesStatus(StatusPart):
    chips: Count = 0
    """TPU chips over all slices."""

    hosts: Count = 0
    """Hosts over all slices."""

    job_set: JobSetRef | None = None
    """The JobSet that runs the job now."""

    queued_resource_name: Annotated[str, Field(max_length=63)] | None = None
    """The QueuedResource whose machines the job runs on or waits for."""


class OperatorState(StatusPart):
    """State that the operator needs after its own restart. It is private: the fields change without notice."""

    job_sets: Count = 0
    """JobSets made so far. The number of the current one is this minus 1."""

    started: bool = False
    """True once the current JobSet has had an attempt."""

    restarts_seen: Count = 0
    """Restarts of the current JobSet that attempts already account for."""

    counted_restarts_seen: Count = 0
    """Restarts among restartsSeen that JobSet counted towards its own limit."""

    resumed_at: Timestamp | None = None
    """Time when the current JobSet was resumed without a restart. Its earlier pods with the present count of restarts
    are of an earlier attempt."""

    starts_without_checkpoint: Count = 0
    """Starts in a row, with the newest, of which none has committed a checkpoint. A suspension by the user and a
    changed template set it to 0."""

    starts_allowed: Count | None = None
    """restarts.maxStartsWithoutCheckpoint as the newest start began. A lower one ends nothing that runs."""

    started_template: Annotated[str, Field(max_length=64)] | None = None
    """Hash of the template and placement that the newest start was made from."""


class TrainingJobStatus(StatusPart):
    """The observed state of the job."""

    observed_generation: Count | None = None
    """Generation of the spec that this status is about."""

    phase: Phase | None = None
    """One word that sums up the conditions. Pending: no JobSet exists yet. Queued: the job waits for quota of Kueue.
    Starting: pods of the first attempt are created or start. Running: all pods run, or some have finished. Restarting:
    an attempt ends or has ended, and not all pods of the next run yet. Suspending: pods save and stop. Suspended:
    nothing runs; condition Suspended has the reason. Complete: the training is done. Failed: the job has ended and is
    not started again."""

    conditions: Annotated[
        tuple[Condition, ...], Field(max_length=MAX_CONDITIONS, json_schema_extra=BY_TYPE)
    ] = ()
    """The state of the job, and why."""

    checkpoint: CheckpointStatus | None = None
    """Committed checkpoints, as last reported, and what is done for a save before maintenance."""

    attempts: Annotated[tuple[Attempt, ...], Field(max_length=MAX_ATTEMPTS)] = ()
    """The newest starts of the job, oldest first: their times, the causes of their ends, their first and last steps."""

    restarts: RestartsStatus = RestartsStatus()
    """Restarts of the job, by cause."""

    progress: ProgressStatus | None = None
    """Progress of the training."""

    next_start_time: Timestamp | None = None
    """Earliest time of the next start: the back-off after a failure, or after starts without a new checkpoint. Absent
    where nothing is waited for."""

    resources: ResourcesStatus | None = None
    """The job's objects and machines in the cluster."""

    operator: OperatorState = OperatorState()
    """Private state of the operator. No client should read it: the fields change without notice."""
