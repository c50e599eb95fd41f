"""Maintenance that users start: at a time of their choice, or simulated."""

from dataclasses import replace

from tpuapi.core.errors import failed_precondition, invalid
from tpuapi.core.names import NODES, check_name, parse_location
from tpuapi.core.values import Json, Maintenance, Node, NodeState, Operation
from tpuapi.core.world import World
from tpuapi.machine.maintenance import begin_maintenance
from tpuapi.methods.answering import Call, Work, run


def perform_maintenance(world: World, request: Json, call: Call) -> tuple[World, Operation]:
    """Begin the maintenance that a node is going to have, now."""
    name = check_name(request.get("name", ""), NODES)
    check_can_be_performed(world.get_node(name))
    return run(
        world,
        request,
        call,
        _work("PerformMaintenance", "performMaintenance", name),
        lambda w: start_now(w, w.get_node(name), call.now),
    )


def simulate_maintenance_event(world: World, request: Json, call: Call) -> tuple[World, Operation]:
    """Fire a maintenance event on the first of the workers, from which the node comes back."""
    name = check_name(request.get("name", ""), NODES)
    node = world.get_node(name)
    for worker_id in request.get("worker_ids", ()):
        if not worker_id.isdecimal() or int(worker_id) >= node.accelerator.n_hosts:
            raise invalid("worker_ids", f"'{worker_id}' is not the 0-based id of a worker of '{name}'")
    if node.state is not NodeState.READY:
        raise failed_precondition(name, "STATE", f"'{name}' is {node.state}, not READY")
    event = Maintenance(
        kind="UNSCHEDULED",
        can_reschedule=False,
        start=call.now,
        end=call.now + world.timings.simulated_s,
        latest_start=call.now,
        ends_in=NodeState.REPAIRING,
    )

    def simulate(world: World) -> World:
        return begin_maintenance(world, replace(world.get_node(name), maintenance=event), call.now)

    work = _work("SimulateMaintenanceEvent", "simulateMaintenanceEvent", name)
    return run(world, request, call, work, simulate)


def check_can_be_performed(node: Node) -> None:
    """Refuse maintenance that is not announced, has begun, or that customers can't trigger."""
    maintenance = node.maintenance
    if maintenance is None or maintenance.is_ongoing:
        description = f"'{node.name}' has no pending maintenance"
        raise failed_precondition(node.name, "NO_PENDING_MAINTENANCE", description)
    if not maintenance.can_reschedule:
        description = f"the maintenance of '{node.name}' can't be rescheduled"
        raise failed_precondition(node.name, "NOT_RESCHEDULABLE", description)


def start_now(world: World, node: Node, now: float) -> World:
    """Begin a node's pending maintenance before its time; it takes as long as it would have."""
    pending = node.maintenance
    if pending is None:
        return world
    moved = replace(pending, start=now, end=now + pending.end - pending.start)
    return begin_maintenance(world, replace(node, maintenance=moved), now)


def _work(method: str, verb: str, name: str) -> Work:
    location = parse_location(name.split(f"/{NODES}/", maxsplit=1)[0])
    return Work(method=method, verb=verb, target=name, location=location)
