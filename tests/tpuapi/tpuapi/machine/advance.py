"""Time passes: everything that is due happens, in order, each thing at its own time."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from tpuapi.core.operations import finish, forget_old
from tpuapi.core.values import Node, NodeState, Operation, QueuedResource
from tpuapi.core.world import World
from tpuapi.machine import queued
from tpuapi.machine.maintenance import begin_maintenance, end_preempted, take_down_for_maintenance
from tpuapi.machine.nodes import become_ready, remove_nodes

Step = Callable[[World, float], World]


def advance(world: World, now: float) -> World:
    """Return the world as it is at `now`, if nobody asks for anything meanwhile."""
    now = max(now, world.now)
    while due := _next(world, now):
        at, step = due
        at = max(at, world.now)
        world = queued.grant(step(replace(world, now=at), at), at)
    return queued.grant(forget_old(replace(world, now=now), now), now)


def next_due(world: World) -> float | None:
    """Return when something happens next by itself, or None."""
    return min((at for at, _ in _all_due(world)), default=None)


def _next(world: World, now: float) -> tuple[float, Step] | None:
    due = [pair for pair in _all_due(world) if pair[0] <= now]
    return min(due, key=lambda pair: pair[0], default=None)


def _all_due(world: World) -> Iterator[tuple[float, Step]]:
    for resource in world.queued.values():
        yield from _due_of_queued(resource, world.now)
    for node in world.nodes.values():
        yield from _due_of_node(node)
    for operation in world.operations.values():
        if operation.due is not None and operation.end_time is None:
            yield operation.due, partial(_fail_operation, operation)


def _due_of_queued(resource: QueuedResource, last: float) -> Iterator[tuple[float, Step]]:
    # The end of the window comes first: at that moment nothing may be created any more.
    if resource.state in queued.WAITING:
        if resource.window.not_after is not None:
            yield resource.window.not_after, partial(_on_queued, resource.name, queued.expire)
        if resource.window.not_before > last:
            yield resource.window.not_before, _nothing
    if resource.due is not None:
        yield resource.due, partial(_on_queued, resource.name, queued.on_due)


def _due_of_node(node: Node) -> Iterator[tuple[float, Step]]:
    if node.due is not None:
        yield node.due, partial(_node_due, node.name)
    if node.maintenance is not None and node.state is NodeState.READY:
        begins_or_ends = node.maintenance.start if node.maintenance.down is None else node.maintenance.down
        yield begins_or_ends, partial(_maintenance_due, node.name)


def _on_queued(
    name: str, step: Callable[[World, QueuedResource, float], World], world: World, now: float
) -> World:
    return step(world, world.get_queued(name), now)


def _node_due(name: str, world: World, now: float) -> World:
    node = world.get_node(name)
    match node.state:
        case NodeState.CREATING:
            return _ready(world, node, "created", now)
        case NodeState.STARTING:
            return _ready(world, node, "started", now)
        case NodeState.REPAIRING | NodeState.RESTARTING:
            return _ready(world, node, "repaired", now)
        case NodeState.DELETING:
            return remove_nodes(world, (node,), now)
        case NodeState.STOPPING:
            return _stopped(world, node, now)
        case _:
            return end_preempted(world, node, now)


def _ready(world: World, node: Node, reason: str, now: float) -> World:
    world = queued.activate_if_ready(become_ready(world, node, reason, now), node.queued_resource)
    return queued.end_maintenance(world, node.queued_resource, now)


def _stopped(world: World, node: Node, now: float) -> World:
    stopped = replace(node, state=NodeState.STOPPED, due=None)
    return finish(world.with_node(stopped), node.name, ("stop",), now, result=stopped)


def _maintenance_due(name: str, world: World, now: float) -> World:
    node = world.get_node(name)
    if node.maintenance is None:
        return world
    if not node.maintenance.is_ongoing:
        return begin_maintenance(world, node, now)
    return take_down_for_maintenance(world, node, node.maintenance, now)


def _fail_operation(operation: Operation, world: World, now: float) -> World:
    return world.with_operation(replace(operation, end_time=now, error=operation.failure))


def _nothing(world: World, now: float) -> World:
    """Time has come for those who wait for it: whoever advances grants."""
    return world
