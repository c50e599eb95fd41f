"""Define CheckpointedTrainingJob, a user's training job. Its status is in `trainingjob_status`.

Field docstrings become the descriptions in the CRD. The rules that a schema can't express are in `rules`.
`SpecPart` describes the class variables `union`, `several` and `compared`.
"""

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from stepkeeper.contract import BestMode, OnDisruption, RestartLimits
from stepkeeper_operator.api.accelerators import Accelerator, choose_chips_per_host, count_chips, count_hosts
from stepkeeper_operator.api.base import SET, ApiModel, ObjectMeta, SpecPart
from stepkeeper_operator.api.v1alpha1.trainingjob_status import TrainingJobStatus

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "SHORT_NAMES",
    "VERSION",
    "AutoIntervalSpec",
    "BackoffSpec",
    "BestSpec",
    "CheckpointSpec",
    "CheckpointedTrainingJob",
    "ContinuousIntervalSpec",
    "EveryIntervalSpec",
    "HangAction",
    "HangSpec",
    "HostsPlacement",
    "IntervalSpec",
    "PlacementSpec",
    "Provisioning",
    "RestartsSpec",
    "RetentionSpec",
    "TPUPlacement",
    "TrainingJobSpec",
]

GROUP: Final = "stepkeeper.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "CheckpointedTrainingJob"
SHORT_NAMES: Final = ("ctj",)
_LIMITS: Final = RestartLimits()

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**31 - 1)]
Steps = Annotated[int, Field(ge=1, le=2**53)]


class Provisioning(StrEnum):
    """Terms on which the machines are bought, which decide how they can be lost."""

    ON_DEMAND = "OnDemand"
    SPOT = "Spot"
    RESERVED = "Reserved"


class TPUPlacement(SpecPart):
    """Slices of a TPU generation."""

    accelerator: Accelerator
    """TPU generation: v4, v5e, v5p, v6e or v7x."""

    topology: Annotated[str, Field(min_length=3, max_length=16)]
    """Chips along each side of one slice: 4x4 for v5e and v6e, 2x2x4 for v4, v5p and v7x."""

    slices: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of slices. Either all of them run or none does. With more than one, each runs on its own node pool."""

    chips_per_host: Annotated[int, Field(ge=1, le=8)] | None = None
    """Chips on each host; this selects the machine type. 1, 4 or 8 for v5e and v6e, 4 for v4 and v5p, 1 or 4
    for v7x. Unset: 4, or 1 if the slice is a single chip."""

    provisioning: Provisioning = Provisioning.ON_DEMAND
    """How the machines are bought; this selects the nodes. OnDemand: all nodes of the accelerator and topology. Spot:
    only those with label cloud.google.com/gke-spot, which the cloud can preempt at any time. Reserved: those of the
    reservation reservationName. Leave it out with queuedResourceName."""

    reservation_name: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Name of the reservation. Set it only with provisioning Reserved."""

    queued_resource_name: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """QueuedResource in the job's namespace whose machines the job runs on. The job waits until they have joined the
    cluster. When they are replaced, it resumes on the new ones."""


class HostsPlacement(SpecPart):
    """Hosts without a TPU. The template has the resources that each of them needs."""

    count: Annotated[int, Field(ge=1, le=4096)]
    """Number of hosts, with one pod on each. Either all of them run or none does."""


class PlacementSpec(SpecPart):
    union: ClassVar = ("tpu", "hosts")

    tpu: TPUPlacement | None = None
    """Run on TPU slices."""

    hosts: HostsPlacement | None = None
    """Run on hosts without a TPU: CPU, or the resources that the template requests."""

    @property
    def queued_resource_name(self) -> str | None:
        """Name of the QueuedResource whose machines the job runs on, if it names one."""
        return self.tpu.queued_resource_name if self.tpu else None

    @property
    def n_slices(self) -> int:
        return self.tpu.slices if self.tpu else 1

    @property
    def hosts_per_slice(self) -> int:
        """Number of pods in one slice. Without a TPU all hosts form one slice."""
        if self.tpu:
            return count_hosts(self.tpu.topology, self.tpu.chips_per_host)
        return self.hosts.count if self.hosts else 0

    @property
    def n_hosts(self) -> int:
        return self.n_slices * self.hosts_per_slice

    @property
    def chips_per_host(self) -> int:
        """The google.com/tpu request of each pod; 0 without a TPU."""
        return choose_chips_per_host(self.tpu.topology, self.tpu.chips_per_host) if self.tpu else 0

    @property
    def n_chips(self) -> int:
        return count_chips(self.tpu.topology) * self.tpu.slices if self.tpu else 0


class EveryIntervalSpec(SpecPart):
    union: ClassVar = ("steps", "seconds")
    several: ClassVar = True

    steps: Steps | None = None
    """Save after this many steps."""

    seconds: PositiveInt | None = None
    """Save after this many seconds."""


class ContinuousIntervalSpec(SpecPart):
    min_seconds: NonNegativeInt | None = None
    """Minimum time from the start of one save to the start of the next. Unset: 0."""


class AutoIntervalSpec(SpecPart):
    max_seconds: PositiveInt | None = None
    """Maximum time from the start of one save to the start of the next. Unset: 3600."""


class IntervalSpec(SpecPart):
    union: ClassVar = ("every", "continuous", "auto")

    every: EveryIntervalSpec | None = None
    """Save after a number of steps or seconds, whichever comes first. Set at least one of them."""

    continuous: ContinuousIntervalSpec | None = None
    """Save whenever no save is in flight. Write continuous: {} for no minimum time between saves."""

    auto: AutoIntervalSpec | None = None
    """Choose the interval that makes saves and repeated steps cheapest, from the measured cost of a save and the rate
    of disruptions. Write auto: {} for the default upper limit."""


class BestSpec(SpecPart):
    """The commits that are best by a metric that the training reports. Commits without the metric are kept too."""

    metric: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the metric, as the training reports it."""

    mode: BestMode
    """Min if the lowest value is best, for example a loss; Max if the highest is, for example an accuracy."""

    count: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Number of commits."""


class RetentionSpec(SpecPart):
    """The checkpoints that are kept. The newest commit is never deleted."""

    last: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Keep this many of the newest commits."""

    every_steps: Steps | None = None
    """Keep, in addition, the commits whose step is a multiple of this."""

    best: BestSpec | None = None
    """Keep, in addition, the commits that are best by a metric."""

    max_age_seconds: Annotated[int, Field(ge=1, le=315_360_000)] | None = None
    """Keep, in addition, the commits that are at most this many seconds older than the newest."""


class CheckpointSpec(SpecPart):
    uri: Annotated[str, Field(min_length=6, max_length=1024)]
    """Root of the job's checkpoints: gs://bucket/prefix, or file:///path on a volume of the template that all
    hosts share. No slash at the end. No other job may use it."""

    interval: IntervalSpec
    """Interval between saves: exactly one of every, continuous and auto."""

    retention: RetentionSpec = RetentionSpec()
    """The checkpoints that are kept."""

    on_disruption: OnDisruption = OnDisruption.SAVE
    """Reaction of all hosts to a notice of a disruption. Save: save one step together, then stop. Skip: stop at
    once."""


class BackoffSpec(SpecPart):
    """Wait before the next start. It doubles with each failure, or with each start without a new checkpoint."""

    initial_seconds: Annotated[int, Field(ge=0, le=86_400)] = _LIMITS.initial_wait_s
    """Wait after the first failure."""

    max_seconds: Annotated[int, Field(ge=0, le=86_400)] = _LIMITS.max_wait_s
    """Longest wait."""


class RestartsSpec(SpecPart):
    max_failures: Annotated[int, Field(ge=0, le=10_000)] = _LIMITS.max_failures
    """Restarts allowed after failures of the application. The next failure is final."""

    max_disruptions: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Restarts allowed after disruptions (preemption, maintenance, a lost node) over the job's life: a new checkpoint
    doesn't reset the count. Unset: no limit."""

    reset_on_new_checkpoint: bool = True
    """Reset the count of failures to 0 at each newly committed checkpoint, so that a job that makes progress
    continues."""

    fatal_exit_codes: Annotated[
        tuple[Annotated[int, Field(ge=0, le=255)], ...], Field(max_length=64, json_schema_extra=SET)
    ] = ()
    """Exit codes of the trainer that fail the job at once. 0, 75, 77 and 78 are rejected: stepkeeper reserves them."""

    max_starts_without_checkpoint: Annotated[int, Field(ge=1, le=1_000_000)] = _LIMITS.max_starts
    """Consecutive starts without a newly committed checkpoint, regardless of how they end. Then the job is suspended
    until a user resumes it: condition Suspended, reason NoNewCheckpoint."""

    backoff: BackoffSpec = BackoffSpec()
    """Wait before restarts after failures, and between starts that end at once without a new checkpoint. It doubles
    each time, up to maxSeconds."""


class HangAction(StrEnum):
    """Reaction to a hang."""

    REPORT = "Report"
    RESTART = "Restart"


class HangSpec(SpecPart):
    """When a training that doesn't move hangs, and what follows. The operator's own settings apply to what is unset."""

    after_seconds: PositiveInt | None = None
    """Seconds without a step after which a training hangs. Unset: ten times the longest step of the attempt so far, and
    at least 300."""

    startup_seconds: PositiveInt | None = None
    """Seconds after which a training hangs that starts, makes its first steps, restores, waits in a call of the
    checkpoint manager, or is in a phase that it has marked without a limit. Each counts from its own beginning."""

    action: HangAction | None = None
    """Report: condition Progressing and an event name the hang. Restart: the attempt is ended, too, and the next one
    resumes from the latest checkpoint."""

    max_restarts: NonNegativeInt | None = None
    """Restarts allowed after hangs. The next hang is only reported. A new checkpoint resets the count if
    restarts.resetOnNewCheckpoint is true. They don't count towards restarts.maxFailures."""


class TrainingJobSpec(SpecPart):
    # The fields that `template_hash` hashes: a JobSet that was built with another hash is replaced.
    compared: ClassVar = ("placement", "template")

    placement: PlacementSpec
    """The machines that the job runs on: exactly one of tpu and hosts."""

    template: dict[str, Any]
    """Pod template of every host. The container named trainer trains and saves checkpoints."""

    suspend: bool = False
    """True: the job saves, stops and releases its machines. False again: it resumes from its latest checkpoint."""

    start_deadline_seconds: PositiveInt | None = None
    """Time for all pods of a start to start their trainers, with pulls and init containers. After it the job is
    suspended until its spec or the annotation stepkeeper.dev/restart is changed: condition Suspended, reason
    StartDeadlineExceeded. Time in a queue doesn't count. Unset: no limit, but a warning after 300 seconds."""

    total_steps: Steps | None = None
    """Steps of the whole training, for status.progress.percent and etaSeconds. The last step is saved regardless of
    the interval. The job is complete when every pod exits 0."""

    checkpoint: CheckpointSpec
    """Place, interval and retention of the checkpoints."""

    restarts: RestartsSpec = RestartsSpec()
    """Limits on restarts, by the cause of the end."""

    hang: HangSpec | None = None
    """When the training hangs, and what follows."""

    ttl_seconds_after_finished: NonNegativeInt | None = None
    """Delete the job this many seconds after its end. Unset: keep the job."""


class CheckpointedTrainingJob(ApiModel):
    """A training job that is restarted from its latest committed checkpoint, whatever interrupts it."""

    api_version: Literal["stepkeeper.dev/v1alpha1"] = "stepkeeper.dev/v1alpha1"
    kind: Literal["CheckpointedTrainingJob"] = "CheckpointedTrainingJob"
    metadata: ObjectMeta
    spec: TrainingJobSpec
    """The job that the user wants."""

    status: TrainingJobStatus = TrainingJobStatus()
    """The observed state of the job. Its checkpoints mirror the storage."""
