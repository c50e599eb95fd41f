"""Define the requests to the Cloud TPU API, and the values in them, independently of Google's client.

`client` implements `CloudTPU`. No type of Google's client is used outside of this package.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from stepkeeper_operator.api.v1alpha1.queuedresource_status import QueuedResourceState
from stepkeeper_operator.errors import OperatorError

__all__ = [
    "ApiVersion",
    "CloudMaintenance",
    "CloudNode",
    "CloudOperationState",
    "CloudQueuedResource",
    "CloudRequest",
    "CloudTPU",
    "CloudTPUError",
    "ErrorKind",
    "Place",
    "to_camel_case",
]

_STATES: Final = {
    state.value: state
    for state in QueuedResourceState
    if state not in {QueuedResourceState.PENDING, QueuedResourceState.GONE}  # without a cloud resource
}


def to_camel_case(name: str) -> str:
    """Convert an API's name to CamelCase: UNHEALTHY_MAINTENANCE to UnhealthyMaintenance. UNKNOWN(77) is unchanged."""
    return name if "(" in name else "".join(part.capitalize() for part in name.split("_"))


class ApiVersion(StrEnum):
    """A version of the Cloud TPU API."""

    V2 = "v2"
    V2ALPHA1 = "v2alpha1"
    """Adds a node's autocheckpoint_enabled and upcoming_maintenance, tier best_effort, and guaranteed.reserved."""

    @property
    def provider(self) -> str:
        """The API and its version, as a status names them."""
        return f"tpu.googleapis.com/{self.value}"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A project and a zone: the parent of queued resources and nodes."""

    project: str
    zone: str

    @property
    def parent(self) -> str:
        """The name of this place in the API."""
        return f"projects/{self.project}/locations/{self.zone}"


class ErrorKind(StrEnum):
    """Kind of an API error, which decides about retries."""

    QUOTA = "Quota"
    """There is no quota left: the same request can succeed later."""

    TERMINAL = "Terminal"
    """The same request fails until a person changes something: a permission, an argument, the project."""

    NOT_FOUND = "NotFound"
    """There is no object with that name."""

    ALREADY_EXISTS = "AlreadyExists"
    """Another object has that name."""

    BUSY = "Busy"
    """FAILED_PRECONDITION or ABORTED: the current state doesn't allow the request."""

    TRANSIENT = "Transient"
    """Unavailable, deadline, internal: try again. The request may have been carried out."""

    CREDENTIALS = "Credentials"
    """There are no credentials, or they were rejected (UNAUTHENTICATED)."""


class CloudTPUError(OperatorError, OSError):
    """The Cloud TPU API rejected a request, or didn't answer."""

    def __init__(self, kind: ErrorKind, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.kind = kind
        self.code = code
        """The gRPC code's name: RESOURCE_EXHAUSTED."""
        self.message = message
        """The API's message, with the details of quotas, reasons and violated fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudRequest:
    """A request to create a queued resource, in the same form for both versions of the API."""

    place: Place
    id: str
    """Id within the place."""

    request_id: str
    """The API carries out a repeated request with the same id only once."""

    api_version: ApiVersion
    node_ids: tuple[str, ...]
    """Ids of the cloud nodes: one, or `<prefix>-0` to `<prefix>-<n-1>`."""

    node_id_prefix: str | None
    """Set if more than one node is requested."""

    node: Mapping[str, Any]
    """Fields of Node, named as in the protos, in proto3 JSON: enums by name, durations as 60s, times as RFC 3339."""

    tier: Mapping[str, Any]
    """One of guaranteed, spot and best_effort, in proto3 JSON."""

    queueing: Mapping[str, Any]
    """Fields of QueueingPolicy, in proto3 JSON; empty: none."""

    reservation_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudMaintenance:
    """Announced maintenance of a node. Times are Unix seconds."""

    type: str
    """The proto's name of the value: SCHEDULED."""

    status: str
    """The proto's name of the value: PENDING, ONGOING."""

    window_start: int | None = None
    window_end: int | None = None

    @property
    def is_ongoing(self) -> bool:
        return self.status == "ONGOING"


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudNode:
    """A node of the Cloud TPU API: one slice of one or more hosts."""

    place: Place
    id: str
    state: str
    """The proto's name of the value: READY, PREEMPTED. A value of any enum without a known name is UNKNOWN(77)."""

    health: str = ""
    """The proto's name of the value; empty: unspecified."""

    health_description: str = ""
    symptoms: tuple[str, ...] = ()
    """One line each, newest first."""

    n_hosts: int = 0
    addresses: tuple[str, ...] = ()
    """Internal address of each host, in the order of their worker ids."""

    labels: Mapping[str, str] = field(default_factory=dict)
    queued_resource: str = ""
    """Full name of the queued resource that it belongs to."""

    autocheckpoint_enabled: bool | None = None
    """None if the version of the API doesn't report it."""

    maintenance: CloudMaintenance | None = None

    @property
    def is_ready(self) -> bool:
        return self.state == "READY"

    @property
    def is_stopped(self) -> bool:
        return self.state == "STOPPED"

    @property
    def is_lost(self) -> bool:
        """True if the cloud has taken the machines away for good."""
        return self.state in {"PREEMPTED", "TERMINATED"}

    @property
    def is_changing(self) -> bool:
        """True if the node is being created or deleted."""
        return self.state in {"CREATING", "DELETING", "STATE_UNSPECIFIED"}

    @property
    def is_healthy(self) -> bool:
        """True if the cloud reports no problem of its health."""
        return self.health in {"", "HEALTHY"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudQueuedResource:
    """A queued resource as the API reports it."""

    place: Place
    id: str
    state: str
    """The proto's name of the value: WAITING_FOR_RESOURCES."""

    initiator: str = ""
    """USER, SERVICE, or empty."""

    node_ids: tuple[str, ...] = ()
    """Ids of the nodes in its request."""

    node: Mapping[str, Any] = field(default_factory=dict)
    """The node in its request, in the form of `CloudRequest.node`."""

    tier: Mapping[str, Any] = field(default_factory=dict)
    queueing: Mapping[str, Any] = field(default_factory=dict)
    reservation_name: str | None = None
    create_time: int | None = None
    error_code: str = ""
    """gRPC code of failed_data.error; empty: none."""

    error_message: str = ""

    @property
    def name(self) -> str:
        """Its full name in the API."""
        return f"{self.place.parent}/queuedResources/{self.id}"

    @property
    def phase(self) -> QueuedResourceState:
        """Its state as status.state of a QueuedResource has it."""
        return _STATES.get(to_camel_case(self.state), QueuedResourceState.UNKNOWN)

    @property
    def lacks_quota(self) -> bool:
        """True if it has failed for lack of quota."""
        return self.error_code == "RESOURCE_EXHAUSTED"

    @property
    def has_other_error(self) -> bool:
        """True if it has failed with another error than the end of its time in the queue."""
        return self.error_code not in {"", "DEADLINE_EXCEEDED"}

    @property
    def suspended_by(self) -> str:
        """The initiator of its suspension, for a message; empty: unknown."""
        return {"USER": "a user", "SERVICE": "the cloud"}.get(self.initiator, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudOperationState:
    """A long-running operation of the API at one moment."""

    name: str
    done: bool
    error: CloudTPUError | None = None
    """Set if it is done and failed."""


class CloudTPU(Protocol):
    """All requests that the operator sends to the Cloud TPU API. Every method raises CloudTPUError."""

    async def list_queued_resources(
        self, place: Place, version: ApiVersion
    ) -> tuple[CloudQueuedResource, ...]:
        """List all queued resources of the place."""

    async def list_nodes(self, place: Place, version: ApiVersion) -> tuple[CloudNode, ...]:
        """List all nodes of the place."""

    async def get_queued_resource(
        self, place: Place, queued_resource_id: str, version: ApiVersion
    ) -> CloudQueuedResource | None:
        """Read one queued resource. Return None if there is none."""

    async def get_node(self, place: Place, node_id: str, version: ApiVersion) -> CloudNode | None:
        """Read one node. Return None if there is none."""

    async def create_queued_resource(self, request: CloudRequest) -> str:
        """Begin to create a queued resource. Return the name of the operation."""

    async def delete_queued_resource(
        self, place: Place, queued_resource_id: str, *, request_id: str, version: ApiVersion
    ) -> str | None:
        """Begin to delete a queued resource and its nodes (force). Return the operation's name; None: not found."""

    async def set_node_labels(
        self, place: Place, node_id: str, labels: Mapping[str, str], version: ApiVersion
    ) -> None:
        """Begin to replace all labels of a node. A missing node is not an error."""

    async def get_operation(self, name: str, version: ApiVersion) -> CloudOperationState | None:
        """Read an operation. Return None if the API no longer knows it."""
