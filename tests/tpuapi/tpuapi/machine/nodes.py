"""What happens to nodes: they are created, taken down, and removed."""

import ipaddress
from collections.abc import Iterable
from dataclasses import replace

from tpuapi.core import operations
from tpuapi.core.accelerators import Accelerator
from tpuapi.core.errors import Code, Status
from tpuapi.core.names import NODES, Location
from tpuapi.core.values import (
    EventKind,
    Health,
    Json,
    Node,
    NodeEvent,
    NodeState,
    QueuedResource,
    Version,
)
from tpuapi.core.world import World

RUNNING = (NodeState.READY,)
"""States in which a node's machines run."""

FIRST_ADDRESS = ipaddress.ip_address("10.160.0.2")
ADDRESSES_PER_NODE = 64


def create_nodes(world: World, resource: QueuedResource, now: float) -> World:
    """Begin to create all nodes of a queued resource; each further one takes a little longer."""
    n_before = 0
    for spec in resource.specs:
        for node_id in spec.node_ids:
            due = now + world.timings.provisioning_s + n_before * world.timings.node_skew_s
            world = create_node(
                world,
                location=resource.location,
                node_id=node_id,
                body=spec.body,
                accelerator=spec.accelerator,
                version=resource.version,
                due=due,
                now=now,
                is_multislice=spec.is_multislice,
                is_preemptible=resource.tier.is_preemptible,
                queued_resource=resource.name,
            )
            n_before += 1
    return world


def create_node(
    world: World,
    *,
    location: Location,
    node_id: str,
    body: Json,
    accelerator: Accelerator,
    version: Version,
    due: float,
    now: float,
    is_multislice: bool = False,
    is_preemptible: bool = False,
    queued_resource: str = "",
) -> World:
    """Begin to create one node, which is ready when `due`."""
    world, number = world.numbered()
    node = Node(
        name=location.name(NODES, node_id),
        location=location,
        node_id=node_id,
        number=number,
        body=body,
        accelerator=accelerator,
        is_preemptible=is_preemptible,
        is_multislice=is_multislice,
        queued_resource=queued_resource,
        create_time=now,
        version=version,
        state=NodeState.CREATING,
        due=due,
    )
    return world.with_node(node)


def become_ready(world: World, node: Node, reason: str, now: float) -> World:
    """The node's machines have started: it is ready, has addresses and runs its startup script."""
    first = FIRST_ADDRESS + node.number * ADDRESSES_PER_NODE
    ready = replace(
        node,
        state=NodeState.READY,
        due=None,
        health=Health.HEALTHY,
        health_description="",
        addresses=tuple(str(first + worker) for worker in range(node.accelerator.n_hosts)),
        maintenance=None,
    )
    world = world.with_node(ready).with_event(
        NodeEvent(kind=EventKind.READY, node=ready, reason=reason, at=now)
    )
    verbs = ("create", "start", "performMaintenance", "simulateMaintenanceEvent")
    return operations.finish(world, node.name, verbs, now, result=ready)


def take_down(
    world: World,
    node: Node,
    state: NodeState,
    reason: str,
    now: float,
    *,
    due: float | None = None,
    health: Health = Health.HEALTH_UNSPECIFIED,
) -> World:
    """End the node's machines, if they run, and leave it in a state that lasts until `due`."""
    down = replace(node, state=state, due=due, health=health, health_description="")
    world = world.with_node(down)
    if node.state not in RUNNING:
        return world
    return world.with_event(NodeEvent(kind=EventKind.GONE, node=down, reason=reason, at=now))


def take_down_all(world: World, nodes: Iterable[Node], reason: str, now: float) -> World:
    """Begin to delete the nodes; whoever asked removes them. Preempted and terminated ones keep their state."""
    ended = (NodeState.PREEMPTED, NodeState.TERMINATED, NodeState.DELETING)
    for node in tuple(nodes):
        if node.state in ended:
            world = world.with_node(replace(node, due=None))
        else:
            world = take_down(world, node, NodeState.DELETING, reason, now)
    return world


def remove_nodes(world: World, nodes: Iterable[Node], now: float) -> World:
    """The nodes are gone; operations on them end."""
    for node in tuple(nodes):
        world = operations.finish(world.without_node(node.name), node.name, ("delete",), now)
        world = abort_rest(world, node.name, now)
    return world


def abort_rest(world: World, target: str, now: float) -> World:
    """End what was going on with a target that is gone."""
    status = Status(code=Code.ABORTED, message=f"'{target}' was deleted meanwhile", reason="DELETED")
    verbs = tuple({operation.verb for operation in world.operations.values() if operation.target == target})
    return operations.finish(world, target, verbs, now, error=status)
