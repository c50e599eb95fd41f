"""All that the service knows at one moment, as one value."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from tpuapi.core.errors import Status, not_found
from tpuapi.core.values import Json, Node, NodeEvent, Operation, QueuedResource


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long things take, in seconds of the service's clock."""

    creating_s: float = 2.0
    accepted_s: float = 0.0
    """With more than 0, requests are ACCEPTED for so long before they are WAITING_FOR_RESOURCES."""
    provisioning_s: float = 60.0
    node_skew_s: float = 2.0
    """How much later each further node of a request is ready."""
    suspending_s: float = 15.0
    deleting_s: float = 10.0
    preempted_s: float = 10.0
    """From a node's preemption or termination to its queued resource's SUSPENDING."""
    repairing_s: float = 60.0
    """How long a node is down for maintenance, at least."""
    stopping_s: float = 10.0
    starting_s: float = 30.0
    autocheckpoint_grace_s: float = 300.0
    """How long maintenance waits for the processes of a node with autocheckpoint to exit."""
    simulated_s: float = 60.0
    """How long a simulated maintenance event is."""
    request_id_memory_s: float = 3600.0
    operation_memory_s: float = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Ways in which the real service has been seen to differ."""

    quota_refused_at_call: bool = True
    """Else a request beyond the quota is received, and FAILED when CREATING is over."""
    preempted_nodes_linger: bool = False
    """Preempted nodes stay until they, or their queued resource, are deleted explicitly."""
    default_page_size: int = 100
    max_page_size: int = 1000


@dataclass(frozen=True, slots=True)
class QuotaKey:
    project: str
    zone: str
    family: str
    preemptible: bool


@dataclass(frozen=True, slots=True)
class RequestKey:
    method: str
    target: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request that was carried out, so that it isn't again."""

    request: Json
    operation: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    now: float = 0.0
    """The time up to which everything has happened that was due, in seconds since 1970."""
    timings: Timings = Timings()
    habits: Habits = Habits()
    queued: Mapping[str, QueuedResource] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    operations: Mapping[str, Operation] = field(default_factory=dict)
    answered: Mapping[RequestKey, Answered] = field(default_factory=dict)
    quotas: Mapping[QuotaKey, int] = field(default_factory=dict)
    """Cores; what has no entry is unlimited."""
    capacity: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Cores by zone and family, as with quotas."""
    reservations: Mapping[str, Json] = field(default_factory=dict)
    runtime_versions: tuple[str, ...] = ()
    failing_deletions: tuple[Status, ...] = ()
    """Errors that the operations of the next deletions of queued resources end with, without any effect."""
    unreachable: frozenset[str] = frozenset()
    """Zones that lists over all zones don't reach."""
    n_named: int = 0
    """How many numbers were given out, to nodes, operations and places in the queue."""
    events: tuple[NodeEvent, ...] = ()
    """What happened to nodes and no hook was told of."""

    def with_queued(self, resource: QueuedResource) -> "World":
        return replace(self, queued={**self.queued, resource.name: resource})

    def without_queued(self, name: str) -> "World":
        return replace(self, queued={key: value for key, value in self.queued.items() if key != name})

    def with_node(self, node: Node) -> "World":
        return replace(self, nodes={**self.nodes, node.name: node})

    def without_node(self, name: str) -> "World":
        return replace(self, nodes={key: value for key, value in self.nodes.items() if key != name})

    def with_operation(self, operation: Operation) -> "World":
        return replace(self, operations={**self.operations, operation.name: operation})

    def with_event(self, event: NodeEvent) -> "World":
        return replace(self, events=(*self.events, event))

    def numbered(self) -> tuple["World", int]:
        """Give out the next number."""
        return replace(self, n_named=self.n_named + 1), self.n_named + 1

    def nodes_of(self, queued_resource: str) -> Iterator[Node]:
        return (node for node in self.nodes.values() if node.queued_resource == queued_resource)

    def get_queued(self, name: str) -> QueuedResource:
        """Find a queued resource.

        Raises:
            ApiError: There is none of that name; NOT_FOUND.
        """
        if name not in self.queued:
            raise not_found(name)
        return self.queued[name]

    def get_node(self, name: str) -> Node:
        """Find a node.

        Raises:
            ApiError: There is none of that name; NOT_FOUND.
        """
        if name not in self.nodes:
            raise not_found(name)
        return self.nodes[name]
