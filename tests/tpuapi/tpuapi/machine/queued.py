"""What happens to queued resources, from one state to the next."""

from dataclasses import replace

from tpuapi.core import operations
from tpuapi.core.errors import Code, Status
from tpuapi.core.quota import has_capacity, quota_exceeded_by
from tpuapi.core.values import Initiator, NodeState, QueuedResource, QueuedState
from tpuapi.core.world import World
from tpuapi.machine.nodes import abort_rest, create_nodes, remove_nodes, take_down_all

WAITING = (QueuedState.ACCEPTED, QueuedState.WAITING_FOR_RESOURCES)
WITH_NODES = (QueuedState.PROVISIONING, QueuedState.ACTIVE)


def on_due(world: World, resource: QueuedResource, now: float) -> World:
    """Leave a state whose time is over."""
    match resource.state:
        case QueuedState.CREATING:
            return _admit(world, resource, now)
        case QueuedState.ACCEPTED:
            return world.with_queued(replace(resource, state=QueuedState.WAITING_FOR_RESOURCES, due=None))
        case QueuedState.SUSPENDING:
            return _finish_suspending(world, resource, now)
        case QueuedState.DELETING:
            return _finish_deleting(world, resource, now)
        case _:
            return world.with_queued(replace(resource, due=None))


def expire(world: World, resource: QueuedResource, now: float) -> World:
    """The time until which nodes may be created is over: the request fails, and stays until it is deleted."""
    message = f"'{resource.name}' could not be fulfilled before its 'valid until' timing constraint expired"
    error = Status(code=Code.DEADLINE_EXCEEDED, message=message, reason="START_TIMING_CONSTRAINT_EXPIRED")
    return fail(world, resource.name, error, now)


def grant(world: World, now: float) -> World:
    """Begin to provision every waiting request whose time has come and for which there is room, first come first."""
    waiting = [
        resource
        for resource in world.queued.values()
        if resource.state is QueuedState.WAITING_FOR_RESOURCES and resource.window.not_before <= now
    ]
    for resource in sorted(waiting, key=lambda each: each.place):
        expired = resource.window.not_after is not None and resource.window.not_after <= now
        if not expired and has_capacity(world, resource.location, resource.specs):
            provisioning = replace(resource, state=QueuedState.PROVISIONING, due=None)
            world = create_nodes(world.with_queued(provisioning), provisioning, now)
    return world


def activate_if_ready(world: World, name: str) -> World:
    """Once all nodes are ready a provisioning request is ACTIVE."""
    resource = world.queued.get(name)
    if resource is None or resource.state is not QueuedState.PROVISIONING:
        return world
    if any(node.state is not NodeState.READY for node in world.nodes_of(name)):
        return world
    return world.with_queued(replace(resource, state=QueuedState.ACTIVE))


def end_maintenance(world: World, name: str, now: float) -> World:
    """Once all nodes are ready again, and none is about to be taken down, their maintenance is over."""
    down = any(
        node.state is not NodeState.READY or (node.maintenance is not None and node.maintenance.is_ongoing)
        for node in world.nodes_of(name)
    )
    resource = world.queued.get(name)
    if resource is None or down:
        return world
    return operations.finish(world, name, ("performMaintenance",), now, result=resource)


def suspend(world: World, name: str, initiator: Initiator, now: float) -> World:
    """Begin to delete the nodes of a request that has some. Others stay as they are."""
    resource = world.queued.get(name)
    if resource is None or resource.state not in WITH_NODES:
        return world
    due = now + world.timings.suspending_s
    suspending = replace(resource, state=QueuedState.SUSPENDING, initiator=initiator, due=due)
    world = take_down_all(world.with_queued(suspending), world.nodes_of(name), "suspended", now)
    return operations.finish(world, name, ("performMaintenance",), now, result=suspending)


def fail(world: World, name: str, error: Status, now: float) -> World:
    """End a request for good: its nodes are removed, and it stays, with the error, until it is deleted."""
    resource = world.get_queued(name)
    if resource.state is QueuedState.DELETING:
        return world
    failed = replace(resource, state=QueuedState.FAILED, due=None, error=error, initiator=Initiator.NOBODY)
    world = take_down_all(world.with_queued(failed), world.nodes_of(name), "failed", now)
    world = remove_nodes(world, world.nodes_of(name), now)
    return operations.finish(world, name, ("create", "reset", "performMaintenance"), now, error=error)


def delete(world: World, name: str, now: float) -> World:
    """Begin to delete the nodes of a request, and then itself."""
    resource = world.get_queued(name)
    due = now + world.timings.deleting_s
    deleting = replace(resource, state=QueuedState.DELETING, due=due, initiator=Initiator.NOBODY)
    return take_down_all(world.with_queued(deleting), world.nodes_of(name), "deleted", now)


def reset(world: World, name: str, now: float) -> World:
    """Delete the nodes of a request, and put it at the end of the queue again."""
    world = take_down_all(world, world.nodes_of(name), "reset", now)
    world = remove_nodes(world, world.nodes_of(name), now)
    world, place = world.numbered()
    waiting = replace(
        world.get_queued(name),
        state=QueuedState.WAITING_FOR_RESOURCES,
        due=None,
        place=place,
        initiator=Initiator.NOBODY,
        error=None,
    )
    return operations.finish(world.with_queued(waiting), name, ("reset",), now, result=waiting)


def _admit(world: World, resource: QueuedResource, now: float) -> World:
    refused = quota_exceeded_by(world, resource)
    if refused is not None:
        return fail(world, resource.name, refused, now)
    accepted_s = world.timings.accepted_s
    state = QueuedState.ACCEPTED if accepted_s else QueuedState.WAITING_FOR_RESOURCES
    admitted = replace(resource, state=state, due=now + accepted_s if accepted_s else None)
    return operations.finish(world.with_queued(admitted), resource.name, ("create",), now, result=admitted)


def _finish_suspending(world: World, resource: QueuedResource, now: float) -> World:
    preempted = (NodeState.PREEMPTED, NodeState.TERMINATED)
    lingers = world.habits.preempted_nodes_linger
    gone = [n for n in world.nodes_of(resource.name) if not (lingers and n.state in preempted)]
    world = remove_nodes(world, gone, now)
    return world.with_queued(replace(resource, state=QueuedState.SUSPENDED, due=None))


def _finish_deleting(world: World, resource: QueuedResource, now: float) -> World:
    world = remove_nodes(world, world.nodes_of(resource.name), now).without_queued(resource.name)
    world = operations.finish(world, resource.name, ("delete",), now, result=resource)
    return abort_rest(world, resource.name, now)
