"""The methods of queued resources."""

from tpuapi.core.errors import already_exists, failed_precondition, invalid
from tpuapi.core.names import NODES, QUEUED_RESOURCES, check_id, check_name, parse_location
from tpuapi.core.operations import fail_later
from tpuapi.core.paging import Page, page_of
from tpuapi.core.quota import check_quota
from tpuapi.core.values import Json, Operation, QueuedResource, QueuedState
from tpuapi.core.world import World
from tpuapi.machine import queued
from tpuapi.methods.answering import Call, Work, run
from tpuapi.methods.maintenance import check_can_be_performed, start_now
from tpuapi.rules.queued import read_queued

DELETED_WITHOUT_FORCE = (
    QueuedState.ACCEPTED,
    QueuedState.WAITING_FOR_RESOURCES,
    QueuedState.FAILED,
    QueuedState.SUSPENDED,
)
"""The documented ones, and WAITING_FOR_RESOURCES, which replaced ACCEPTED."""

RESET_FROM = (QueuedState.ACTIVE, QueuedState.FAILED, QueuedState.SUSPENDED)


def list_queued_resources(world: World, request: Json, _: Call) -> tuple[World, Page[QueuedResource]]:
    parent = parse_location(request.get("parent", ""))
    named = [(each.name, each) for each in world.queued.values() if parent.holds(each.location)]
    return world, page_of(world, parent, named, request)


def get_queued_resource(world: World, request: Json, _: Call) -> tuple[World, QueuedResource]:
    return world, world.get_queued(check_name(request.get("name", ""), QUEUED_RESOURCES))


def create_queued_resource(world: World, request: Json, call: Call) -> tuple[World, Operation]:
    location = parse_location(request.get("parent", ""))
    resource_id = check_id(request.get("queued_resource_id", ""), "queued_resource_id")
    name = location.name(QUEUED_RESOURCES, resource_id)

    def create(world: World) -> World:
        if name in world.queued:
            raise already_exists(name)
        asked = read_queued(world, location, resource_id, request.get("queued_resource"), call.now)
        if world.habits.quota_refused_at_call:
            accelerators = [spec.accelerator for spec in asked.specs for _ in spec.node_ids]
            check_quota(world, location, accelerators, preemptible=asked.tier.is_preemptible)
        world, place = world.numbered()
        return world.with_queued(
            QueuedResource(
                name=name,
                location=location,
                body=asked.body,
                specs=asked.specs,
                tier=asked.tier,
                window=asked.window,
                create_time=call.now,
                place=place,
                version=call.version,
                state=QueuedState.CREATING,
                due=call.now + world.timings.creating_s,
            )
        )

    work = Work(method="CreateQueuedResource", verb="create", target=name, location=location)
    return run(world, request, call, work, create)


def delete_queued_resource(world: World, request: Json, call: Call) -> tuple[World, Operation]:
    name = check_name(request.get("name", ""), QUEUED_RESOURCES)

    def delete(world: World) -> World:
        resource = world.get_queued(name)
        if resource.state is QueuedState.DELETING:
            raise failed_precondition(name, "ALREADY_DELETING", f"'{name}' is being deleted already")
        if not request.get("force", False) and not _may_go_without_force(world, resource):
            raise failed_precondition(
                name,
                "FORCE_REQUIRED",
                f"'{name}' is {resource.state}: without force a queued resource is only deleted if its nodes "
                "have already been deleted or it is in the ACCEPTED, FAILED, or SUSPENDED state",
            )
        return world if world.failing_deletions else queued.delete(world, name, call.now)

    work = _work("DeleteQueuedResource", "delete", name)
    after, operation = run(world, request, call, work, delete)
    if world.failing_deletions and operation.name not in world.operations:
        return fail_later(after, operation, call.now)
    return after, operation


def reset_queued_resource(world: World, request: Json, call: Call) -> tuple[World, Operation]:
    name = check_name(request.get("name", ""), QUEUED_RESOURCES)
    resource = world.get_queued(name)
    if resource.state not in RESET_FROM:
        raise failed_precondition(name, "STATE", f"'{name}' is {resource.state}: it can't be reset")
    world, operation = run(world, request, call, _work("ResetQueuedResource", "reset", name), lambda w: w)
    world = queued.reset(world, name, call.now)
    return world, world.operations[operation.name]


def perform_maintenance_queued_resource(world: World, request: Json, call: Call) -> tuple[World, Operation]:
    name = check_name(request.get("name", ""), QUEUED_RESOURCES)
    world.get_queued(name)
    node_names = request.get("node_names", ())
    if not node_names:
        raise invalid("node_names", "the names of the nodes are required")
    for node_name in node_names:
        node = world.get_node(check_name(node_name, NODES, "node_names"))
        if node.queued_resource != name:
            raise invalid("node_names", f"'{node_name}' is not a node of '{name}'")
        check_can_be_performed(node)

    def perform(world: World) -> World:
        for node_name in node_names:
            world = start_now(world, world.get_node(node_name), call.now)
        return world

    work = _work("PerformMaintenanceQueuedResource", "performMaintenance", name)
    return run(world, request, call, work, perform)


def _may_go_without_force(world: World, resource: QueuedResource) -> bool:
    if resource.state in DELETED_WITHOUT_FORCE:
        return True
    had_nodes = resource.state in (QueuedState.ACTIVE, QueuedState.SUSPENDING)
    return had_nodes and not any(world.nodes_of(resource.name))


def _work(method: str, verb: str, name: str) -> Work:
    location = parse_location(name.split(f"/{QUEUED_RESOURCES}/", maxsplit=1)[0])
    return Work(method=method, verb=verb, target=name, location=location)
