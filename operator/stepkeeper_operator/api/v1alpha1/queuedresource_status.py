"""Define the status of a QueuedResource: a mirror of the cloud for people, and the operator's persistent state."""

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
    """The cloud has accepted the request. If False, the message explains what to change."""

    ACTIVE = "Active"
    """All machines are provided."""

    NODES_JOINED = "NodesJoined"
    """All hosts are Ready nodes of this cluster, and none is cordoned. Then jobs start."""

    DEGRADED = "Degraded"
    """There is a problem with the resource. The message explains what to do."""

    MAINTENANCE_SCHEDULED = "MaintenanceScheduled"
    """The cloud has announced maintenance. The message has its time."""

    QUOTA_EXHAUSTED = "QuotaExhausted"
    """The project's quota is insufficient. The request is retried with increasing waits."""


class QueuedResourceState(StrEnum):
    """The state of the cloud resource. In the first two states there is none in the cloud."""

    PENDING = "Pending"
    """The operator hasn't created one yet, or waits before it recreates one."""

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
    """The API reports a state that this version doesn't know."""


class MaintenanceStatus(StatusPart):
    """Maintenance that the cloud has announced for a slice."""

    status: Annotated[str, Field(max_length=32)]
    """Pending or Ongoing."""

    type: Annotated[str, Field(max_length=64)] = ""
    """Kind of maintenance, as the cloud names it: Scheduled or Unscheduled."""

    window_start: Timestamp | None = None
    """Earliest start of the maintenance."""

    window_end: Timestamp | None = None
    """Expected end of the maintenance."""


class SliceStatus(StatusPart):
    """One slice, as the cloud reports it."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    """Id of the slice in the cloud."""

    state: Annotated[str, Field(max_length=32)]
    """State of the slice, as the cloud names it: Creating, Ready, Repairing, Preempted, Terminated and others."""

    health: Annotated[str, Field(max_length=64)] = ""
    """Health of the slice, as the cloud names it: Healthy, Timeout, UnhealthyTensorflow, UnhealthyMaintenance."""

    health_description: Annotated[str, Field(max_length=512)] = ""
    """The cloud's explanation of the health."""

    symptoms: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=8)] = ()
    """Symptoms that the cloud reports for the hosts, newest first."""

    hosts: Count = 0
    """Number of hosts of the slice; 0 while the cloud doesn't report it. Each is a Node of this cluster once it has
    joined: kubectl get nodes -l stepkeeper.dev/slice=NAME."""

    joined_hosts: Count = 0
    """Number of hosts that are Ready nodes of this cluster and not cordoned."""

    autocheckpoint_enabled: bool | None = None
    """The setting in the cloud; absent while the cloud doesn't report it."""

    upcoming_maintenance: MaintenanceStatus | None = None
    """Maintenance that the cloud has announced."""


class CloudOperation(StatusPart):
    """A long-running operation of the cloud that the operator follows."""

    name: Annotated[str, Field(min_length=1, max_length=512)]
    """Name of the operation in the cloud."""

    verb: Annotated[str, Field(max_length=32)]
    """Create or Delete."""

    start_time: Timestamp
    """Time when the operator started it."""


class CloudError(StatusPart):
    """The last error of the cloud about this resource."""

    code: Annotated[str, Field(min_length=1, max_length=64)]
    """The cloud's error code, for example RESOURCE_EXHAUSTED or PERMISSION_DENIED."""

    message: Annotated[str, Field(max_length=2048)]
    """The cloud's error message."""

    kind: Annotated[str, Field(max_length=32)] = ""
    """Kind of error: Quota, Terminal, NotFound, AlreadyExists, Busy, Transient or Credentials."""

    verb: Annotated[str, Field(max_length=32)] = ""
    """The request that failed: List, Create, Delete or Label."""

    time: Timestamp
    """Time of its first occurrence."""


class RemovalStatus(StatusPart):
    """A removal of the cloud resource in progress: its machines are drained, then deleted."""

    reason: Annotated[str, Field(min_length=1, max_length=128)]
    """The reason in one word, as in condition Active."""

    start_time: Timestamp
    """Start of the removal, and of the limited time that pods on the machines have to end."""


class ResourceOperatorState(StatusPart):
    """State that the operator needs after its own restart. It is private: the fields change without notice."""

    number: Count = 0
    """Number of the current cloud resource: 0, plus 1 with each recreation. Its id and request ids derive from it."""

    created: bool = False
    """True once the creation of the current one was requested: from then on it may exist in the cloud."""

    adopting: Annotated[str, Field(max_length=64)] = ""
    """During an adoption: the uid that the label of the cloud resource had before, or none. The object's own uid:
    another object has taken over the resource, and the annotation still names it."""

    adopted: bool = False
    """True if the current one was not made for this object, whose label its slices have now."""

    identity: Annotated[str, Field(max_length=128)] = ""
    """Id and creation time, as id@seconds, of the cloud resource that is being adopted, was adopted last, or was taken
    over by another object."""

    asked_at: Timestamp | None = None
    """Time of the request for the current one, while that may still be pending."""

    spec_hash: Annotated[str, Field(max_length=64)] = ""
    """Hash of the fields that the current one was created with."""

    streak: Count = 0
    """Consecutive recreations without an hour of being active in between."""

    retries: Count = 0
    """Consecutive errors, including requests that were accepted and failed. The next wait depends on it, and the id of
    the next request to delete."""

    quota_failures: Count = 0
    """Failures for lack of quota since it was active. The next wait depends on it."""

    @property
    def lost(self) -> bool:
        """True once another object has taken over the current one."""
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
    has expired. Deleting: it is being deleted. Gone: it was removed and isn't recreated. Unknown: the cloud reports a
    state that this version of the operator doesn't know."""

    cloud_name: Annotated[str, Field(max_length=512)] = ""
    """Full name of the cloud resource: projects/<project>/locations/<zone>/queuedResources/<id>."""

    provider: Annotated[str, Field(max_length=64)] = ""
    """The API that creates and deletes the cloud resource: tpu.googleapis.com/v2 or tpu.googleapis.com/v2alpha1."""

    conditions: Annotated[
        tuple[Condition, ...], Field(max_length=MAX_CONDITIONS, json_schema_extra=BY_TYPE)
    ] = ()
    """The state of the resource, and why."""

    active_since: Timestamp | None = None
    """Time when the current cloud resource became active. It is kept while the cloud takes the machines back."""

    missing_hosts_since: Timestamp | None = None
    """Time since which at least one host has been missing. The hosts have joinTimeoutSeconds from then on."""

    joined: Annotated[str, Field(max_length=16)] = ""
    """Hosts that are Ready nodes of this cluster and not cordoned, of the total: 3/4. While the total is unknown:
    3/?."""

    autocheckpoint: Annotated[str, Field(max_length=16)] = ""
    """Autocheckpoint as set in the cloud: On, Off, or Mixed; empty while unknown."""

    next_maintenance_time: Timestamp | None = None
    """Earliest known start of announced maintenance in the future. Absent if the cloud gives no time for it. If there
    is none in the future, the latest start."""

    slice_count: Count = 0
    """Slices of the resource."""

    slices: Annotated[tuple[SliceStatus, ...], Field(max_length=MAX_SLICES)] = ()
    """The slices. If there are more than 64, those with problems come first."""

    removal: RemovalStatus | None = None
    """The removal of the cloud resource that is in progress."""

    operation: CloudOperation | None = None
    """Long-running operation of the cloud that the operator follows."""

    error: CloudError | None = None
    """Last error of the cloud; absent once it is resolved."""

    next_try_time: Timestamp | None = None
    """Earliest time of the next request: the back-off after an error or before a recreation."""

    recreations: Count = 0
    """Number of recreations of the cloud resource."""

    operator: ResourceOperatorState = ResourceOperatorState()
    """Private state of the operator. Clients must not read it: the fields change without notice."""

    @property
    def was_seen(self) -> bool:
        """True once the cloud has listed the current cloud resource, or has accepted the request for it."""
        return self.state not in {None, QueuedResourceState.PENDING, QueuedResourceState.GONE}

    @property
    def removing(self) -> str:
        """The reason of the removal in progress; empty: there is none."""
        return "" if self.removal is None else self.removal.reason
