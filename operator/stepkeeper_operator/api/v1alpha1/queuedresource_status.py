"""Define the status of a QueuedResource: a mirror of the cloud for people, and what the operator has to remember."""

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field

from stepkeeper_operator.api.base import BY_TYPE, Count, StatusPart, Timestamp
from stepkeeper_operator.api.v1alpha1.conditions import MAX_CONDITIONS, Condition

__all__ = [
    "MAX_SLICES",
    "CloudError",
    "CloudOperation",
    "MaintenanceStatus",
    "QueuedResourceConditionType",
    "QueuedResourceState",
    "QueuedResourceStatus",
    "RemovalStatus",
    "ResourceOperatorState",
    "SliceStatus",
]

MAX_SLICES: Final = 64
"""Slices that the status lists; sliceCount is their number."""


class QueuedResourceConditionType(StrEnum):
    ACCEPTED = "Accepted"
    """The cloud took the request. A False one says what to change."""

    ACTIVE = "Active"
    """All machines are provided."""

    NODES_JOINED = "NodesJoined"
    """All hosts are Ready nodes of this cluster, and none is cordoned. Jobs start then."""

    DEGRADED = "Degraded"
    """Something of it isn't as it should be, and the message says what to do."""

    MAINTENANCE_SCHEDULED = "MaintenanceScheduled"
    """The cloud has announced maintenance; the message says when."""

    QUOTA_EXHAUSTED = "QuotaExhausted"
    """The project's quota doesn't suffice. The request is tried again, slowly."""


class QueuedResourceState(StrEnum):
    """The state of the cloud resource. The first two are states in which the cloud has none."""

    PENDING = "Pending"
    """The operator hasn't created one yet, or waits before it recreates it."""

    GONE = "Gone"
    """It was removed and isn't recreated."""

    CREATING = "Creating"
    ACCEPTED = "Accepted"
    WAITING = "WaitingForResources"
    PROVISIONING = "Provisioning"
    ACTIVE = "Active"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    FAILED = "Failed"
    DELETING = "Deleting"
    UNKNOWN = "Unknown"
    """The API names a state that this version doesn't know."""


class MaintenanceStatus(StatusPart):
    """Maintenance that the cloud has announced for a slice."""

    status: Annotated[str, Field(max_length=32)]
    """Pending or Ongoing."""

    type: Annotated[str, Field(max_length=64)] = ""
    """The cloud's word for its kind: Scheduled or Unscheduled."""

    window_start: Timestamp | None = None
    """It doesn't begin earlier."""

    window_end: Timestamp | None = None
    """It is expected to be over then."""


class SliceStatus(StatusPart):
    """One slice, as the cloud has it."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """Its id in the cloud."""

    state: Annotated[str, Field(max_length=32)]
    """The cloud's word: Creating, Ready, Repairing, Preempted, Terminated and others."""

    health: Annotated[str, Field(max_length=64)] = ""
    """The cloud's word: Healthy, Timeout, UnhealthyTensorflow, UnhealthyMaintenance."""

    health_description: Annotated[str, Field(max_length=512)] = ""
    """The cloud's explanation of its health."""

    symptoms: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=8)] = ()
    """What the cloud saw on its hosts, newest first."""

    hosts: Count = 0
    """Number of hosts of the slice; 0 while the cloud doesn't report it. Each is a Node of this cluster once it has
    joined: kubectl get nodes -l stepkeeper.dev/slice=NAME."""

    joined_hosts: Count = 0
    """Number of hosts that are Ready nodes of this cluster and not cordoned."""

    autocheckpoint_enabled: bool | None = None
    """The setting as the cloud has it; absent while the cloud doesn't report it."""

    upcoming_maintenance: MaintenanceStatus | None = None
    """Maintenance that the cloud has announced."""


class CloudOperation(StatusPart):
    """A long-running operation of the cloud that the operator follows."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    """Its name in the cloud."""

    verb: Annotated[str, Field(max_length=32)]
    """Create or Delete."""

    start_time: Timestamp
    """When the operator began it."""


class CloudError(StatusPart):
    """The last error of the cloud about this resource."""

    code: Annotated[str, Field(min_length=1, max_length=64)]
    """The cloud's code: RESOURCE_EXHAUSTED, PERMISSION_DENIED."""

    message: Annotated[str, Field(max_length=2048)]
    """The cloud's own words."""

    kind: Annotated[str, Field(max_length=32)] = ""
    """What it means: Quota, Terminal, NotFound, AlreadyExists, Busy, Transient or Credentials."""

    verb: Annotated[str, Field(max_length=32)] = ""
    """What was asked: List, Create, Delete or Label."""

    time: Timestamp
    """When it was seen first."""


class RemovalStatus(StatusPart):
    """A removal of the cloud resource that has begun: its machines are drained, then deleted."""

    reason: Annotated[str, Field(min_length=1, max_length=128)]
    """One word that says why, as condition Active has it."""

    start_time: Timestamp
    """Time when it began: pods on the machines have a bounded time from then."""


class ResourceOperatorState(StatusPart):
    """State that the operator needs after its own restart. It is private: the fields change without notice."""

    number: Count = 0
    """Number of the present cloud resource: 0, and one more with each recreation. Its id and request ids follow."""

    created: bool = False
    """A creation of the present one was begun: from then on it may exist in the cloud."""

    adopting: Annotated[str, Field(max_length=64)] = ""
    """Set while the label of something that the annotation names is rewritten: the uid that it named before, or
    none. The object's own uid: another one has taken it over since, and the annotation still names it."""

    adopted: bool = False
    """The present one was not made for this object, which has its label on the slices."""

    identity: Annotated[str, Field(max_length=128)] = ""
    """The id and creation time, as id@seconds, of what is being adopted or was adopted last, or of what another object
    has taken over."""

    asked_at: Timestamp | None = None
    """When the present one was asked for, while a request may still be on its way."""

    spec_hash: Annotated[str, Field(max_length=64)] = ""
    """Hash of the fields that the present one was created with."""

    streak: Count = 0
    """Recreations in a row without an hour of being active in between."""

    retries: Count = 0
    """Errors in a row: the next wait follows, and the next request to delete. One that is accepted and fails counts."""

    quota_failures: Count = 0
    """Failures for lack of quota since it was active: the next wait follows."""

    @property
    def lost(self) -> bool:
        """True once another object has taken the present one over."""
        return self.created and bool(self.identity) and not self.adopted


class QueuedResourceStatus(StatusPart):
    """The observed state of the request."""

    observed_generation: Count | None = None
    """Generation of the spec that this status is about."""

    state: QueuedResourceState | None = None
    """State of the cloud resource. Pending: not requested yet, or waiting for the next try (nextTryTime). Creating: the
    cloud is creating the request. Accepted, WaitingForResources: the request waits in the cloud's queue for machines.
    Provisioning: the machines are being provided. Active: all machines are provided. Suspending: the cloud takes the
    machines back. Suspended: the machines are gone. Failed: the cloud could not provide the machines, or the request
    has run out. Deleting: it is being deleted. Gone: it was removed and isn't recreated. Unknown: the cloud reports a
    state that this version of the operator doesn't know."""

    cloud_name: Annotated[str, Field(max_length=512)] = ""
    """Full name of the cloud resource: projects/<project>/locations/<zone>/queuedResources/<id>."""

    provider: Annotated[str, Field(max_length=64)] = ""
    """The API that it is made and deleted by: tpu.googleapis.com/v2 or tpu.googleapis.com/v2alpha1."""

    conditions: Annotated[
        tuple[Condition, ...], Field(max_length=MAX_CONDITIONS, json_schema_extra=BY_TYPE)
    ] = ()
    """The state of the resource, and why."""

    active_since: Timestamp | None = None
    """Time when the present cloud resource became active. It stays while the cloud takes the machines back."""

    missing_hosts_since: Timestamp | None = None
    """Time when hosts began to be missing that are missing now. They have joinTimeoutSeconds from then on."""

    joined: Annotated[str, Field(max_length=16)] = ""
    """Hosts that are Ready nodes of this cluster and not cordoned, of all: 3/4. While the number of all isn't known,
    3/?."""

    autocheckpoint: Annotated[str, Field(max_length=16)] = ""
    """Autocheckpoint as the cloud has it: On, Off, or Mixed; empty while that isn't known."""

    next_maintenance_time: Timestamp | None = None
    """Earliest known beginning of announced maintenance that is ahead. If the cloud gives a time for none of that, it
    is absent; if none is ahead, it is the latest beginning."""

    slice_count: Count = 0
    """Slices of the resource."""

    slices: Annotated[tuple[SliceStatus, ...], Field(max_length=MAX_SLICES)] = ()
    """The slices; with more than 64, first those that aren't well."""

    removal: RemovalStatus | None = None
    """The removal of the cloud resource that is in progress."""

    operation: CloudOperation | None = None
    """Long-running operation of the cloud that the operator follows."""

    error: CloudError | None = None
    """Last error of the cloud; absent once it has passed."""

    next_try_time: Timestamp | None = None
    """Earliest time of the next request: the back-off after an error or before a recreation."""

    recreations: Count = 0
    """Times that the cloud resource was recreated."""

    operator: ResourceOperatorState = ResourceOperatorState()
    """Private state of the operator. No client should read it: the fields change without notice."""

    @property
    def was_seen(self) -> bool:
        """True once the cloud has shown the present cloud resource, or has taken the request for it."""
        return self.state not in {None, QueuedResourceState.PENDING, QueuedResourceState.GONE}

    @property
    def removing(self) -> str:
        """The reason of the removal in progress; empty: none is."""
        return "" if self.removal is None else self.removal.reason
