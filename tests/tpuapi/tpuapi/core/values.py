"""What the service knows of queued resources, nodes and operations. Values are frozen; bodies are never changed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tpuapi.core.accelerators import Accelerator
from tpuapi.core.errors import Status
from tpuapi.core.names import Location

Json = Mapping[str, Any]
"""A message in its JSON form, with the field names of v2alpha1, which has all fields of v2."""


class QueuedState(StrEnum):
    CREATING = "CREATING"
    ACCEPTED = "ACCEPTED"
    WAITING_FOR_RESOURCES = "WAITING_FOR_RESOURCES"
    PROVISIONING = "PROVISIONING"
    ACTIVE = "ACTIVE"
    SUSPENDING = "SUSPENDING"
    SUSPENDED = "SUSPENDED"
    FAILED = "FAILED"
    DELETING = "DELETING"


class NodeState(StrEnum):
    CREATING = "CREATING"
    READY = "READY"
    RESTARTING = "RESTARTING"
    REIMAGING = "REIMAGING"
    DELETING = "DELETING"
    REPAIRING = "REPAIRING"
    STOPPED = "STOPPED"
    STOPPING = "STOPPING"
    STARTING = "STARTING"
    PREEMPTED = "PREEMPTED"
    TERMINATED = "TERMINATED"
    UNKNOWN = "UNKNOWN"


class Health(StrEnum):
    HEALTH_UNSPECIFIED = "HEALTH_UNSPECIFIED"
    HEALTHY = "HEALTHY"
    TIMEOUT = "TIMEOUT"
    UNHEALTHY_TENSORFLOW = "UNHEALTHY_TENSORFLOW"
    UNHEALTHY_MAINTENANCE = "UNHEALTHY_MAINTENANCE"


class Tier(StrEnum):
    """The oneof `tier`; none at all means on demand, as `guaranteed` does."""

    NONE = ""
    GUARANTEED = "guaranteed"
    SPOT = "spot"
    BEST_EFFORT = "best_effort"

    @property
    def is_preemptible(self) -> bool:
        return self in (Tier.SPOT, Tier.BEST_EFFORT)


class Initiator(StrEnum):
    NOBODY = "STATE_INITIATOR_UNSPECIFIED"
    USER = "USER"
    SERVICE = "SERVICE"


class Version(StrEnum):
    """The version of the API that a call came by."""

    V2 = "v2"
    V2ALPHA1 = "v2alpha1"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWindow:
    """When nodes may be created, in seconds since 1970."""

    not_before: float = 0.0
    not_after: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """The nodes that one element of `tpu.node_spec` asks for."""

    node_ids: tuple[str, ...]
    accelerator: Accelerator
    is_multislice: bool
    body: Json
    """The Node as asked for, without what only the service sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedResource:
    name: str
    location: Location
    body: Json
    """The QueuedResource as asked for, without what only the service sets."""
    specs: tuple[NodeSpec, ...]
    tier: Tier
    window: StartWindow
    create_time: float
    place: int
    """Lower places are served first."""
    version: Version
    """The version of the API that created it."""
    state: QueuedState
    due: float | None
    """When the state ends by itself, or None: something else ends it."""
    initiator: Initiator = Initiator.NOBODY
    error: Status | None = None
    shown: Json = field(default_factory=dict)
    """Fields that are answered in place of what the service has in them."""

    @property
    def n_cores(self) -> int:
        return sum(spec.accelerator.n_cores * len(spec.node_ids) for spec in self.specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintenance:
    """One event of maintenance that a node is going to have, or has."""

    kind: str
    """SCHEDULED or UNSCHEDULED."""
    can_reschedule: bool
    start: float
    end: float
    latest_start: float
    ends_in: NodeState
    """The node's state when it is taken down; REPAIRING nodes come back."""
    down: float | None = None
    """When the node is taken down; None before the event has begun."""

    @property
    def is_ongoing(self) -> bool:
        return self.down is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    kind: str
    details: str
    worker_id: str
    create_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    location: Location
    node_id: str
    number: int
    body: Json
    accelerator: Accelerator
    is_preemptible: bool
    is_multislice: bool
    queued_resource: str
    """The name of the queued resource that asked for it, or empty."""
    create_time: float
    version: Version
    state: NodeState
    due: float | None
    health: Health = Health.HEALTH_UNSPECIFIED
    health_description: str = ""
    addresses: tuple[str, ...] = ()
    symptoms: tuple[Symptom, ...] = ()
    maintenance: Maintenance | None = None
    shown: Json = field(default_factory=dict)
    """Fields that are answered in place of what the service has in them."""

    @property
    def metadata(self) -> Mapping[str, str]:
        return dict(self.body.get("metadata", {}))

    @property
    def autocheckpoint_enabled(self) -> bool:
        return bool(self.body.get("autocheckpoint_enabled", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A long-running operation. It is done once it has an end time."""

    name: str
    location: Location
    verb: str
    target: str
    version: Version
    create_time: float
    end_time: float | None = None
    error: Status | None = None
    result: QueuedResource | Node | None = None
    """The target as it was at the end; None where the method answers with nothing."""
    cancel_requested: bool = False
    failure: Status | None = None
    """The error with which it is going to end, without having done anything."""
    due: float | None = None
    """When it ends with that error."""


class EventKind(StrEnum):
    READY = "ready"
    TERMINATING = "terminating"
    GONE = "gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """Something that happened to a node's machines, for hooks."""

    kind: EventKind
    node: Node
    reason: str
    """created, started, repaired; maintenance, preempted, deleted, suspended, failed, reset, stopped."""
    at: float
    deadline: float | None = None
    """When a terminating node is taken down."""
