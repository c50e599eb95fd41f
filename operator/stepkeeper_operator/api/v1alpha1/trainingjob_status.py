"""Define the status of a CheckpointedTrainingJob. Its conditions are in `conditions`.

It is a mirror for people, and it holds the state that the operator needs after its own restart.
"""

from typing import Annotated

from pydantic import Field

from stepkeeper_operator.api.base import BY_TYPE, BriefPart, Count, StatusPart, Timestamp
from stepkeeper_operator.api.v1alpha1.conditions import MAX_CONDITIONS, Condition, Phase

__all__ = [
    "MAX_NOTICE",
    "MAX_RECENT",
    "SHOWN_ATTEMPTS",
    "Attempt",
    "CauseCount",
    "CheckpointStatus",
    "CommitStatus",
    "GoodputStatus",
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

_MAX_ATTEMPTS = 10
SHOWN_ATTEMPTS = 5
MAX_NOTICE = 64
_MAX_METRICS = 16
MAX_RECENT = 10

Step = Annotated[int, Field(ge=0)]


class CommitStatus(StatusPart):
    """One committed checkpoint."""

    sequence: Count
    """Slot of the commit in the storage log. It increases with each commit, regardless of the step."""

    step: Step
    """Last step that the checkpoint contains."""

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
    """A save that the operator requested from the training."""

    id: Annotated[str, Field(min_length=1, max_length=64)]
    """Id of the request. The training carries out each id once."""

    attempt: Count
    """Number of the attempt that got the request. The next one gets another if it has unsaved steps."""

    maintenance_time: Timestamp
    """Start of the maintenance that the save is for."""

    time: Timestamp
    """Time of the request."""

    reason: Annotated[str, Field(max_length=512)] = ""
    """Reason for the request."""

    latest_sequence: Count | None = None
    """Slot of the newest commit at that time. Any later commit fulfills the request."""

    sequence: Count | None = None
    """Slot of the commit that fulfilled the request. Unset: none has."""

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
    """Of the ten newest reported commits, the one whose save took longest, unless it is the latest."""

    last_request: SaveRequest | None = None
    """The last save that the operator requested, before announced maintenance."""

    autocheckpoint: Annotated[str, Field(max_length=16)] | None = None
    """Autocheckpoint on the job's QueuedResource: On, Off or Mixed. With On, the cloud waits up to 300 s for a save
    before maintenance. Absent if the job names no QueuedResource, or it doesn't exist."""

    root: Annotated[str, Field(max_length=64)] | None = None
    """Identity of the storage log of these commits: the nonce of its first entry."""

    tail: Count | None = None
    """Highest reported slot of that log. latest changes only when this grows or when root changes."""


class Attempt(StatusPart):
    """One start of all hosts together."""

    number: Count
    """Number of the start, counted from 1 over the job's life."""

    start: Timestamp
    """Time when its pods were created."""

    end: Timestamp | None = None
    """Time when it ended. Unset: it is the current attempt."""

    kind: Annotated[str, Field(max_length=64)] | None = None
    """Kind of its end: Completed, Failed, OverLimits, Unrecoverable, Disrupted, Requested, MachinesUnavailable,
    Suspended or Stopped. Later versions may add others."""

    cause: Annotated[str, Field(max_length=64)] | None = None
    """Cause of its end: ApplicationError, SpotPreemption, NodeFailure, … The operator can still correct it for
    two minutes after the end."""

    inferred: bool | None = None
    """True if no evidence proves the cause."""

    from_step: Step | None = None
    """Step of the checkpoint that it resumed from. Unset: it started from scratch, or has not reported yet."""

    to_step: Step | None = None
    """Last step that it reported as finished."""

    notice: Annotated[str, Field(max_length=MAX_NOTICE)] | None = None
    """The notice that made its pods stop, as they reported it: sigterm, file, …"""

    node: Annotated[str, Field(max_length=253)] | None = None
    """Node where its end began."""

    message: Annotated[str, Field(max_length=1024)] | None = None
    """The evidence of its end."""

    decision: Annotated[str, Field(max_length=512)] | None = None
    """The decision of its pods about a save when they stopped, and the reason."""

    stacks: Annotated[str, Field(max_length=253)] | None = None
    """ConfigMap with the stacks of all hosts in its last hang. Those of the last three attempts that hung are kept."""


class CauseCount(StatusPart):
    cause: Annotated[str, Field(max_length=64)]
    """Cause of attempts that ended."""

    count: Count
    """Restarts for this cause over the job's life."""

    counted_towards_limit: Count = 0
    """Number of these restarts that currently count towards the limit of their kind. A new checkpoint can reset the
    failures and hangs to 0. Always 0 if there is no limit."""


class RestartsStatus(StatusPart):
    total: Count = 0
    """Restarts over the job's life."""

    by_cause: Annotated[tuple[CauseCount, ...], Field(max_length=32)] = ()
    """The same restarts, by cause."""

    last_cause: Annotated[str, Field(max_length=64)] | None = None
    """Cause of the newest end of an attempt."""

    last_node: Annotated[str, Field(max_length=253)] | None = None
    """Node where that end began."""


class Metric(StatusPart):
    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the metric in the training code."""

    value: Annotated[str, Field(max_length=64)]
    """Newest value, as text."""


class ProgressStatus(StatusPart):
    """Progress of the training; written at most once a minute."""

    display: Annotated[str, Field(max_length=64)] | None = None
    """The last finished step and totalSteps, such as 120/500. Without a step, the trainer's percent, such as 45%."""

    eta: Annotated[str, Field(max_length=32)] | None = None
    """etaSeconds in days, hours and minutes, such as 3h05m."""

    step: Step | None = None
    """Last finished step."""

    percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """Finished share of totalSteps, or the share that the trainer reports by itself."""

    eta_seconds: Count | None = None
    """Estimated time to totalSteps at the current speed, without disruptions."""

    step_millis: Count | None = None
    """Duration of a step."""

    last_progress_time: Timestamp | None = None
    """Time when a report, or the end of an attempt, last showed a higher step."""

    longest_step_millis: Count | None = None
    """Not set any more: the pods themselves measure the steps."""

    slowest_rank: Count | None = None
    """The rank of the slowest host."""

    metrics: Annotated[tuple[Metric, ...], Field(max_length=_MAX_METRICS)] = ()
    """Values that the training code reports, e.g. the loss."""


class GoodputStatus(StatusPart):
    """The time of the job, as reported: what made steps that were kept (goodput), and what the rest was spent on.

    Time in a queue and while the job is suspended isn't counted, nor are attempts whose image reports no times.
    Categories without a second are absent.
    """

    productive_seconds: Count | None = None
    """Time of the steps that were kept."""

    percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """Share of productiveSeconds in the whole time."""

    init_seconds: Count | None = None
    """From the start of the trainers to their restore: imports, devices, the process group."""

    compile_seconds: Count | None = None
    """The first two steps of each start."""

    data_seconds: Count | None = None
    """Waits for data, as far as the training reports them."""

    save_seconds: Count | None = None
    """Waits of the training for saves, including the last one."""

    restore_seconds: Count | None = None
    """Restores."""

    wasted_seconds: Count | None = None
    """Time of the steps that were made again, or have to be."""

    infrastructure_seconds: Count | None = None
    """The rest: ends that had to be noticed, back-off, new machines, pods that were created, scheduled and started."""

    lost_steps: Count | None = None
    """The steps of wastedSeconds."""


class JobSetRef(StatusPart):
    name: Annotated[str, Field(max_length=63)]
    """Name of the JobSet."""

    uid: Annotated[str, Field(max_length=64)]
    """Uid of the JobSet."""


class ResourcesStatus(BriefPart):
    chips: Count = 0
    """TPU chips over all slices."""

    hosts: Count = 0
    """Hosts over all slices."""

    job_set: JobSetRef | None = None
    """The JobSet that currently runs the job."""

    queued_resource_name: Annotated[str, Field(max_length=63)] | None = None
    """The QueuedResource whose machines the job runs on or waits for."""


class OperatorState(BriefPart):
    """State that the operator needs after its own restart. It is private: the fields change without notice."""

    job_sets: Count = 0
    """JobSets created so far. The number of the current one is this minus 1."""

    started: bool = False
    """True once the current JobSet has had an attempt."""

    restarts_seen: Count = 0
    """Restarts of the current JobSet that the attempts include."""

    counted_restarts_seen: Count = 0
    """Restarts among restartsSeen that JobSet counted towards its own limit."""

    resumed_at: Timestamp | None = None
    """Time when the current JobSet was resumed without a restart. Its earlier pods with the same count of restarts
    belong to an earlier attempt."""

    starts_without_checkpoint: Count = 0
    """Consecutive starts, up to the newest, without a committed checkpoint. A suspension by the user and a changed
    template reset it to 0."""

    starts_allowed: Count | None = None
    """restarts.maxStartsWithoutCheckpoint when the newest start began. A later, lower value ends no running attempt."""

    started_template: Annotated[str, Field(max_length=64)] | None = None
    """Hash of the template and placement of the newest start, and of the annotation stepkeeper.dev/restart then."""

    accounted_attempts: Count = 0
    """Number of the last attempt in `accounted`."""

    accounted: Annotated[str, Field(max_length=512)] | None = None
    """The time of all ended attempts, by category: JSON. The goodput has the last attempt's time too."""


class TrainingJobStatus(StatusPart):
    """The observed state of the job."""

    observed_generation: Count | None = None
    """Generation of the spec that this status is about."""

    phase: Phase | None = None
    """One word that summarizes the conditions. Pending: no JobSet exists yet. Queued: the job waits for quota in Kueue.
    Starting: pods of the first attempt are being created or started. Running: all pods run, or some have finished.
    Restarting: an attempt is ending or has ended, and not all pods of the next one run yet. Suspending: pods save and
    stop. Suspended: nothing runs; condition Suspended has the reason. Complete: the training is done. Failed: the job
    has ended and is not restarted."""

    why: Annotated[str, Field(max_length=128)] | None = None
    """The reason of the phase in one word, or of what is wrong while the job runs. The conditions have the details."""

    conditions: Annotated[
        tuple[Condition, ...], Field(max_length=MAX_CONDITIONS, json_schema_extra=BY_TYPE)
    ] = ()
    """The state of the job, and why."""

    checkpoint: CheckpointStatus | None = None
    """Committed checkpoints, as last reported, and the save requested before maintenance."""

    attempts: Annotated[tuple[Attempt, ...], Field(max_length=_MAX_ATTEMPTS)] = ()
    """The five newest starts of the job, oldest first: times, causes of their ends, first and last steps."""

    restarts: RestartsStatus = RestartsStatus()
    """Restarts of the job, by cause."""

    progress: ProgressStatus | None = None
    """Progress of the training."""

    goodput: GoodputStatus | None = None
    """The time that was spent on steps, and on what else."""

    next_start_time: Timestamp | None = None
    """Earliest time of the next start: the back-off after a failure, or after starts without a new checkpoint. Absent
    if the job isn't waiting."""

    resources: ResourcesStatus | None = None
    """The job's objects and machines in the cluster."""

    operator: OperatorState = OperatorState()
    """Private state of the operator. Clients must not read it: the fields change without notice."""
