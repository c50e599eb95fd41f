"""CheckpointedTrainingJob: what a user asks for. Its status is in `trainingjob_status`.

Field docstrings are the descriptions in the CRD; the rules that a schema can't say are in `rules`.
"""

from enum import StrEnum
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from stepkeeper.contract import IntervalType, OnDisruption
from stepkeeper_operator.api.accelerators import Accelerator, chips_per_host, count_chips, count_hosts
from stepkeeper_operator.api.base import SET, Resource, SpecPart, StatusPart, Timestamp
from stepkeeper_operator.api.v1alpha1.trainingjob_status import TrainingJobStatus

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "PLURAL",
    "SHORT_NAMES",
    "SINGULAR",
    "VERSION",
    "BackoffSpec",
    "CheckpointSpec",
    "CheckpointedTrainingJob",
    "HostsPlacement",
    "IntervalSpec",
    "ObjectMeta",
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
PLURAL: Final = "checkpointedtrainingjobs"
SINGULAR: Final = "checkpointedtrainingjob"
SHORT_NAMES: Final = ("ctj",)

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
Steps = Annotated[int, Field(ge=1, le=2**53)]


class Provisioning(StrEnum):
    """How the machines are paid for, and so how they are lost."""

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
    """Number of slices. All of them run, or none."""

    chips_per_host: Annotated[int, Field(ge=1, le=8)] | None = None
    """Chips on each host, which chooses the machine type: 1, 4 or 8 for v5e and v6e, 4 for v4 and v5p, 1 or 4 for
    v7x. Unset: 4, or 1 where the slice is a single chip."""

    provisioning: Provisioning = Provisioning.ON_DEMAND
    """Spot: machines that can be taken away at any time. Reserved: from the reservation that is named."""

    reservation_name: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Name of the reservation; only with provisioning Reserved."""


class HostsPlacement(SpecPart):
    """Hosts without a TPU: the template says what each of them needs."""

    count: Annotated[int, Field(ge=1, le=4096)]
    """Number of hosts, with one pod on each. All of them run, or none."""


class PlacementSpec(SpecPart):
    """Where the job runs: exactly one of tpu and hosts."""

    tpu: TPUPlacement | None = None
    """On TPU slices."""

    hosts: HostsPlacement | None = None
    """On hosts without a TPU: CPU, or whatever the template asks for."""

    @property
    def n_slices(self) -> int:
        return self.tpu.slices if self.tpu else 1

    @property
    def hosts_per_slice(self) -> int:
        """Pods of one slice; without a TPU all hosts are one slice."""
        if self.tpu:
            return count_hosts(self.tpu.topology, self.tpu.chips_per_host)
        return self.hosts.count if self.hosts else 0

    @property
    def n_hosts(self) -> int:
        return self.n_slices * self.hosts_per_slice

    @property
    def chips_per_host(self) -> int:
        """The google.com/tpu that each pod asks for; 0 without a TPU."""
        return chips_per_host(self.tpu.topology, self.tpu.chips_per_host) if self.tpu else 0

    @property
    def n_chips(self) -> int:
        return count_chips(self.tpu.topology) * self.tpu.slices if self.tpu else 0


class IntervalSpec(SpecPart):
    """How often a checkpoint is saved. With steps and seconds, whichever comes first."""

    type: IntervalType = IntervalType.FIXED
    """Fixed: as steps and seconds say. Continuous: whenever no save is in flight. Auto: so often that saving and
    repeating lost steps cost least together, by the measured cost of a save and how often the job was disrupted."""

    steps: Steps | None = None
    """Fixed: save after that many steps."""

    seconds: PositiveInt | None = None
    """Fixed: save after that many seconds. Continuous: not sooner than that after the last one. Auto: not later."""


class RetentionSpec(SpecPart):
    """Which checkpoints are kept. The newest commit is never deleted."""

    last: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Keep that many of the newest commits."""

    every_steps: Steps | None = None
    """Keep besides the commits whose step is a multiple of this."""


class CheckpointSpec(SpecPart):
    """Where, when and how long checkpoints are kept."""

    uri: Annotated[str, Field(min_length=6, max_length=1024)]
    """Root of the job's checkpoints: gs://bucket/prefix, or file:///path on a volume of the template that all hosts
    share. Without a slash at its end. No other job may use it."""

    interval: IntervalSpec
    """When checkpoints are saved."""

    retention: RetentionSpec = RetentionSpec()
    """Which checkpoints are kept."""

    on_disruption: OnDisruption = OnDisruption.SAVE
    """What all hosts do together at notice of a disruption. Save: save one step, then stop. Skip: stop at once."""


class BackoffSpec(SpecPart):
    """How long the operator waits before it starts the job again after failures; doubled each time."""

    initial_seconds: Annotated[int, Field(ge=0, le=86_400)] = 10
    """Wait after the first failure."""

    max_seconds: Annotated[int, Field(ge=0, le=86_400)] = 600
    """Longest wait."""


class RestartsSpec(SpecPart):
    """How often the job is started again, by the cause of its end."""

    max_failures: Annotated[int, Field(ge=0, le=10_000)] = 3
    """Restarts after failures of the application; the next failure is final."""

    max_disruptions: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Restarts after disruptions (preemption, maintenance, a lost node). Unset: without bound."""

    reset_on_new_checkpoint: bool = True
    """A newly committed checkpoint sets the count of failures back to 0: a job that makes progress goes on."""

    fatal_exit_codes: Annotated[
        tuple[Annotated[int, Field(ge=0, le=255)], ...], Field(max_length=64, json_schema_extra=SET)
    ] = ()
    """Exit codes of the trainer after which the job fails at once."""

    backoff: BackoffSpec = BackoffSpec()
    """Waiting before restarts after failures. Disruptions are not waited after."""


class TrainingJobSpec(SpecPart):
    """What the job is."""

    placement: PlacementSpec
    """Where the job runs: exactly one of tpu and hosts."""

    template: dict[str, Any]
    """Pod template of every host. One container is named trainer: the process that trains, and saves checkpoints."""

    suspend: bool = False
    """True: the job saves, stops and gives its machines back. False again: it resumes from its latest checkpoint."""

    total_steps: Steps | None = None
    """Steps of the whole training: for percent and the estimated end; the last one is saved whatever the interval. The
    job is complete when every pod exits 0."""

    checkpoint: CheckpointSpec
    """Where, when and how long checkpoints are kept."""

    restarts: RestartsSpec = RestartsSpec()
    """How often the job is started again."""

    ttl_seconds_after_finished: Count | None = None
    """Delete the job that long after its end. Unset: its record is kept."""


class ObjectMeta(StatusPart):
    """The part of metadata that the operator reads."""

    name: str
    namespace: str
    uid: str
    generation: int = 1
    resource_version: str = ""
    deletion_timestamp: Timestamp | None = None
    labels: dict[str, str] = Field(default_factory=dict)


class CheckpointedTrainingJob(Resource):
    """A training job that is started again from its latest committed checkpoint, whatever ends it."""

    api_version: Literal["stepkeeper.dev/v1alpha1"] = "stepkeeper.dev/v1alpha1"
    kind: Literal["CheckpointedTrainingJob"] = "CheckpointedTrainingJob"
    metadata: ObjectMeta
    spec: TrainingJobSpec
    """What the job is."""

    status: TrainingJobStatus = TrainingJobStatus()
    """What became of it. Storage is the truth, this is its mirror."""
