"""Maintenance and preemption: what the service does to nodes without being asked."""

from dataclasses import replace

from tpuapi.core import operations
from tpuapi.core.values import EventKind, Health, Initiator, Maintenance, Node, NodeEvent, NodeState
from tpuapi.core.world import World
from tpuapi.machine.nodes import take_down
from tpuapi.machine.queued import suspend


def preempt(world: World, name: str, now: float, *, state: NodeState = NodeState.PREEMPTED) -> World:
    """Take a node away. Its queued resource is suspended a little later.

    Args:
        world: What there is.
        name: The node.
        now: The time.
        state: The state that the node is left in; it has been seen that it isn't always PREEMPTED.
    """
    node = replace(world.get_node(name), maintenance=None)
    return take_down(world, node, state, "preempted", now, due=now + world.timings.preempted_s)


def begin_maintenance(world: World, node: Node, now: float) -> World:
    """Tell the node's processes to end. With autocheckpoint it is taken down once they have, or after the grace."""
    maintenance = node.maintenance
    if maintenance is None or node.state is not NodeState.READY:
        return world.with_node(replace(node, maintenance=None))
    grace_s = world.timings.autocheckpoint_grace_s if node.autocheckpoint_enabled else 0.0
    ongoing = replace(
        node,
        maintenance=replace(maintenance, down=now + grace_s),
        health=Health.UNHEALTHY_MAINTENANCE,
        health_description="The node is under maintenance",
    )
    event = NodeEvent(
        kind=EventKind.TERMINATING, node=ongoing, reason="maintenance", at=now, deadline=now + grace_s
    )
    return world.with_node(ongoing).with_event(event)


def take_down_for_maintenance(world: World, node: Node, maintenance: Maintenance, now: float) -> World:
    """The node is down: until the maintenance is over, or for good, which suspends its queued resource."""
    comes_back = maintenance.ends_in is NodeState.REPAIRING
    timings = world.timings
    due = max(maintenance.end, now + timings.repairing_s) if comes_back else now + timings.preempted_s
    world = take_down(
        world,
        node,
        maintenance.ends_in,
        "maintenance",
        now,
        due=due,
        health=Health.UNHEALTHY_MAINTENANCE,
    )
    if comes_back:
        return world
    verbs = ("performMaintenance", "simulateMaintenanceEvent")
    return operations.finish(world, node.name, verbs, now, result=world.get_node(node.name))


def processes_exited(world: World, name: str, now: float) -> World:
    """The processes of a node that waits for them have ended: it is taken down now."""
    node = world.get_node(name)
    if node.maintenance is None or node.maintenance.down is None or node.state is not NodeState.READY:
        return world
    return world.with_node(replace(node, maintenance=replace(node.maintenance, down=now)))


def end_preempted(world: World, node: Node, now: float) -> World:
    """Suspend the queued resource of a node that was taken away."""
    world = world.with_node(replace(node, due=None))
    return suspend(world, node.queued_resource, Initiator.SERVICE, now)
