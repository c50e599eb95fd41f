"""Let nodes pass through their states while time goes by: created, maintained, preempted, removed."""

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Final

from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudQueuedResource, Place
from tpuapi.accelerators import Accelerator, read_accelerator

_FIRST_ADDRESS: Final = ipaddress.ip_address("10.160.0.2")
_ADDRESSES_PER_NODE: Final = 64

ENDED: Final = {"PREEMPTED", "TERMINATED"}
"""States of nodes that are gone for good, without being deleted."""

Key = tuple[Place, str]


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
    autocheckpoint_grace_s: float = 300.0
    """How long maintenance waits for the processes of a node with autocheckpoint to exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """Something that happened to a node's machines, for hooks."""

    kind: str
    """ready, terminating or gone."""
    node: CloudNode
    number: int
    """Another one for each life of a node."""
    accelerator: Accelerator
    metadata: Mapping[str, str]
    reason: str
    """created, repaired; maintenance, preempted, deleted, suspended, failed."""
    grace_s: float | None = None
    """For terminating: the seconds after which the node is taken down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machines:
    """What a node's machines are, in one life of it."""

    number: int
    accelerator: Accelerator
    metadata: Mapping[str, str]


class Nodes:
    """Keep the nodes, and the timers of all that is going to happen by itself."""

    def __init__(
        self, clock: Callable[[], float], timings: Timings | None, hosts_per_node: int | None
    ) -> None:
        self.now = clock
        self.timings = timings or Timings()
        self.nodes: dict[Key, CloudNode] = {}
        self.hooks: list[Callable[[NodeEvent], None]] = []
        self._hosts_per_node = hosts_per_node
        self._at = clock()
        """The time up to which everything has happened that was due."""

        self._timers: dict[str, tuple[float, Callable[[], None]]] = {}
        """What is going to happen, by the name of what it happens to."""

        self._machines: dict[str, _Machines] = {}
        self._numbers = count(1)

    def advance(self) -> None:
        """Let everything happen that is due by now, each thing at its own time."""
        now = max(self.now(), self._at)
        while (due := self.next_due()) is not None and due <= now:
            name = min(self._timers, key=lambda each: self._timers[each][0])
            _, happen = self._timers.pop(name)
            self._at = max(self._at, due)
            happen()
            self.grant()
        self._at = now
        self.grant()

    def grant(self) -> None:
        """Begin to create nodes for which there is room now."""
        raise NotImplementedError

    def on_ready(self, node: CloudNode) -> None:
        """Note that a node has become ready."""
        raise NotImplementedError

    def on_lost(self, node: CloudNode) -> None:
        """Note that a node was taken away a while ago."""
        raise NotImplementedError

    def next_due(self) -> float | None:
        """Return when something happens next by itself, or None."""
        return min((at for at, _ in self._timers.values()), default=None)

    def create_node(self, resource: CloudQueuedResource, node_id: str) -> CloudNode:
        """Begin to create a node, as its request describes it."""
        node = CloudNode(
            place=resource.place,
            id=node_id,
            state="CREATING",
            labels=dict(resource.node.get("labels", {})),
            queued_resource=resource.name,
            autocheckpoint_enabled=bool(resource.node.get("autocheckpoint_enabled")),
        )
        self.nodes[resource.place, node_id] = node
        self._machines[name_of(node)] = _Machines(
            number=next(self._numbers),
            accelerator=read_accelerator(resource.node),
            metadata=resource.node.get("metadata", {}),
        )
        return node

    def become_ready(self, key: Key, reason: str = "created") -> None:
        """Let a node's machines start: it is ready and has addresses."""
        node = self.nodes.get(key)
        if node is None:
            return
        machines = self._machines[name_of(node)]
        n_hosts = machines.accelerator.n_hosts if self._hosts_per_node is None else self._hosts_per_node
        first = _FIRST_ADDRESS + machines.number * _ADDRESSES_PER_NODE
        ready = replace(
            node,
            state="READY",
            health="HEALTHY",
            health_description="",
            n_hosts=n_hosts,
            addresses=tuple(str(first + host) for host in range(n_hosts)),
            maintenance=None,
        )
        self.nodes[key] = ready
        self._report("ready", ready, reason)
        self.on_ready(ready)

    def take_away(self, key: Key, state: str, reason: str) -> None:
        """Take a node away for good. Its queued resource is suspended a little later."""
        self._take_down(key, state, reason)
        self._later(name_of(self.nodes[key]), self.timings.preempted_s, partial(self._lose, key))

    def maintain(self, key: Key, ends_in: str) -> None:
        """Tell a node's processes to end. With autocheckpoint it is taken down once they have, or after the grace."""
        node = self.nodes.get(key)
        if node is None or node.state != "READY" or node.maintenance is None:
            return
        grace_s = self.timings.autocheckpoint_grace_s if node.autocheckpoint_enabled else 0.0
        ongoing = replace(
            node,
            maintenance=replace(node.maintenance, status="ONGOING"),
            health="UNHEALTHY_MAINTENANCE",
            health_description="The node is under maintenance",
        )
        self.nodes[key] = ongoing
        self._later(f"{name_of(node)} maintenance", grace_s, partial(self._go_down, key, ends_in))
        self._report("terminating", ongoing, "maintenance", grace_s)

    def end_grace(self, key: Key) -> None:
        """Take a node down at once that maintenance waits for."""
        name = f"{name_of(self.nodes[key])} maintenance"
        maintenance = self.nodes[key].maintenance
        if maintenance is not None and maintenance.status == "ONGOING" and name in self._timers:
            self._timers[name] = (self._at, self._timers[name][1])
            self.advance()

    def remove_later(self, key: Key) -> None:
        """Begin to delete one node."""
        self._take_down(key, "DELETING", "deleted")
        self._later(name_of(self.nodes[key]), self.timings.deleting_s, partial(self._remove_if_there, key))

    def _later(self, name: str, seconds: float, happen: Callable[[], None]) -> None:
        self._timers[name] = (self._at + seconds, happen)

    def _take_down(self, key: Key, state: str, reason: str) -> None:
        """End a node's machines, if they run."""
        node = self.nodes[key]
        self.nodes[key] = replace(node, state=state, health="", health_description="")
        if node.state == "READY":
            self._report("gone", self.nodes[key], reason)

    def _remove_if_there(self, key: Key) -> None:
        if key in self.nodes:
            self._remove([self.nodes[key]])

    def _remove(self, nodes: Iterable[CloudNode]) -> None:
        for node in nodes:
            self._timers.pop(name_of(node), None)
            del self.nodes[node.place, node.id]

    def _go_down(self, key: Key, ends_in: str) -> None:
        """Take a node down for maintenance: until it is over, or for good."""
        node = self.nodes.get(key)
        if node is None or node.state != "READY" or node.maintenance is None:
            return
        if ends_in != "REPAIRING":
            self.take_away(key, ends_in, "maintenance")
            return
        self._take_down(key, ends_in, "maintenance")
        self.nodes[key] = replace(self.nodes[key], health="UNHEALTHY_MAINTENANCE")
        left_s = (node.maintenance.window_end or 0) - self._at
        due_s = max(left_s, self.timings.repairing_s)
        self._later(name_of(node), due_s, partial(self.become_ready, key, "repaired"))

    def _report(self, kind: str, node: CloudNode, reason: str, grace_s: float | None = None) -> None:
        machines = self._machines[name_of(node)]
        event = NodeEvent(
            kind=kind,
            node=node,
            number=machines.number,
            accelerator=machines.accelerator,
            metadata=machines.metadata,
            reason=reason,
            grace_s=grace_s,
        )
        for hook in self.hooks:
            hook(event)

    def _lose(self, key: Key) -> None:
        if key in self.nodes:
            self.on_lost(self.nodes[key])


def name_of(node: CloudNode) -> str:
    return f"{node.place.parent}/nodes/{node.id}"
