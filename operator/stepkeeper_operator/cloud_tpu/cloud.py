"""Define what the operator asks of the Cloud TPU API, and what it is answered, as values of its own.

Google's client is behind `CloudTPU`; nothing outside of this room sees a type of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

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
]


class ApiVersion(StrEnum):
    """A version of the Cloud TPU API."""

    V2 = "v2"
    V2ALPHA1 = "v2alpha1"
    """Has more: a node's autocheckpoint_enabled and upcoming_maintenance, tier best_effort, guaranteed.reserved."""

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
    """Meaning of an error of the API for the request that got it."""

    QUOTA = "Quota"
    """There is no quota left: the same request can succeed later."""

    TERMINAL = "Terminal"
    """The same request is refused again until somebody changes something: permission, argument, no such project."""

    NOT_FOUND = "NotFound"
    """There is nothing of that name."""

    ALREADY_EXISTS = "AlreadyExists"
    """Something has that name already."""

    BUSY = "Busy"
    """FAILED_PRECONDITION or ABORTED: the state doesn't allow it now."""

    TRANSIENT = "Transient"
    """Unavailable, deadline, internal: try again. The request may have been carried out."""

    CREDENTIALS = "Credentials"
    """There are no credentials, or they were refused (UNAUTHENTICATED)."""


class CloudTPUError(OperatorError, OSError):
    """The Cloud TPU API refused a request, or gave no answer."""

    def __init__(self, kind: ErrorKind, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.kind = kind
        self.code = code
        """The gRPC code's name: RESOURCE_EXHAUSTED."""
        self.message = message
        """The API's own words, with the details of quotas, reasons and violated fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudRequest:
    """A queued resource as it is to be created: the same for both versions of the API."""

    place: Place
    id: str
    """Its id below the place."""

    request_id: str
    """The same request with the same id is carried out once."""

    api_version: ApiVersion
    node_ids: tuple[str, ...]
    """Ids of the cloud nodes: one, or `<prefix>-0` to `<prefix>-<n-1>`."""

    node_id_prefix: str | None
    """Set where more than one node is asked for."""

    node: Mapping[str, Any]
    """Fields of Node, named as in the protos, in proto3 JSON: enums by name, durations as 60s, times as RFC 3339."""

    tier: Mapping[str, Any]
    """One of guaranteed, spot and best_effort, in proto3 JSON."""

    queueing: Mapping[str, Any]
    """Fields of QueueingPolicy, in proto3 JSON; empty: none."""

    reservation_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudMaintenance:
    """Maintenance that is announced for a node. Times are Unix seconds."""

    type: str
    """The proto's name of the value: SCHEDULED."""

    status: str
    """The proto's name of the value: PENDING, ONGOING."""

    window_start: int | None = None
    window_end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudNode:
    """A node of the Cloud TPU API: one slice of one or more hosts."""

    place: Place
    id: str
    state: str
    """The proto's name of the value: READY, PREEMPTED. Of all enums, a value that has none there is UNKNOWN(77)."""

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
    """None where the version of the API doesn't tell."""

    maintenance: CloudMaintenance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudQueuedResource:
    """A queued resource as the API has it."""

    place: Place
    id: str
    state: str
    """The proto's name of the value: WAITING_FOR_RESOURCES."""

    initiator: str = ""
    """USER, SERVICE, or empty."""

    node_ids: tuple[str, ...] = ()
    """Ids of the nodes that its request names."""

    node: Mapping[str, Any] = field(default_factory=dict)
    """The node of its request, in the form of `CloudRequest.node`."""

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
        """Begin to delete a queued resource with its nodes (force). Return the operation's name; None: it is gone."""

    async def set_node_labels(
        self, place: Place, node_id: str, labels: Mapping[str, str], version: ApiVersion
    ) -> None:
        """Begin to replace all labels of a live node. That it is gone is no error."""

    async def get_operation(self, name: str, version: ApiVersion) -> CloudOperationState | None:
        """Look at an operation. Return None if the API has forgotten it."""
