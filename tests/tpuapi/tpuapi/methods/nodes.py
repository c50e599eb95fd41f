"""The methods of nodes."""

import copy
from dataclasses import replace
from typing import Any

from tpuapi.core import operations
from tpuapi.core.errors import ApiError, Code, Status, already_exists, failed_precondition, invalid
from tpuapi.core.names import NODES, check_id, check_name, parse_location
from tpuapi.core.paging import Page, page_of
from tpuapi.core.quota import check_quota, has_capacity
from tpuapi.core.values import Initiator, Json, Node, NodeSpec, NodeState, Operation
from tpuapi.core.world import World
from tpuapi.machine import queued
from tpuapi.machine.nodes import create_node as begin_to_create
from tpuapi.machine.nodes import take_down
from tpuapi.methods.answering import Call, Work, run
from tpuapi.rules.nodes import MAX_DESCRIPTION, check_labels, check_metadata, check_tags, read_node

UPDATABLE = ("description", "tags", "labels", "metadata", "network_config.enable_external_ips")


def list_nodes(world: World, request: Json, _: Call) -> tuple[World, Page[Node]]:
    parent = parse_location(request.get("parent", ""))
    named = [(node.name, node) for node in world.nodes.values() if parent.holds(node.location)]
    return world, page_of(world, parent, named, request)


def get_node(world: World, request: Json, _: Call) -> tuple[World, Node]:
    return world, world.get_node(check_name(request.get("name", ""), NODES))


def create_node(world: World, request: Json, call: Call) -> tuple[World, Operation]:
    location = parse_location(request.get("parent", ""))
    node_id = check_id(request.get("node_id", ""), "node_id")
    name = location.name(NODES, node_id)

    def create(world: World) -> World:
        if name in world.nodes:
            raise already_exists(name)
        if "node" not in request:
            raise invalid("node", "the node is required")
        body, accelerator = read_node(world, request["node"], "node")
        scheduling = body.get("scheduling_config", {})
        preemptible = bool(scheduling.get("preemptible") or scheduling.get("spot"))
        check_quota(world, location, [accelerator], preemptible=preemptible)
        spec = NodeSpec(node_ids=(node_id,), accelerator=accelerator, is_multislice=False, body=body)
        if not has_capacity(world, location, (spec,)):
            raise ApiError(_no_capacity(location.zone))
        return begin_to_create(
            world,
            location=location,
            node_id=node_id,
            body=body,
            accelerator=accelerator,
            version=call.version,
            due=call.now + world.timings.provisioning_s,
            now=call.now,
            is_preemptible=preemptible,
        )

    work = Work(method="CreateNode", verb="create", target=name, location=location)
    return run(world, request, call, work, create)


def delete_node(world: World, request: Json, call: Call) -> tuple[World, Operation]:
    """Delete a node; the queued resource that it belongs to loses all its nodes, by the user's doing."""
    name = check_name(request.get("name", ""), NODES)

    def delete(world: World) -> World:
        node = world.get_node(name)
        if node.state is NodeState.DELETING:
            raise failed_precondition(name, "ALREADY_DELETING", f"'{name}' is being deleted already")
        due = call.now + world.timings.deleting_s
        world = take_down(world, node, NodeState.DELETING, "deleted", call.now, due=due)
        return queued.suspend(world, node.queued_resource, Initiator.USER, call.now)

    return run(world, request, call, _work("DeleteNode", "delete", name), delete)


def stop_node(world: World, request: Json, call: Call) -> tuple[World, Operation]:
    name = check_name(request.get("name", ""), NODES)

    def stop(world: World) -> World:
        node = _single(world.get_node(name), NodeState.READY)
        due = call.now + world.timings.stopping_s
        return take_down(world, node, NodeState.STOPPING, "stopped", call.now, due=due)

    return run(world, request, call, _work("StopNode", "stop", name), stop)


def start_node(world: World, request: Json, call: Call) -> tuple[World, Operation]:
    name = check_name(request.get("name", ""), NODES)

    def start(world: World) -> World:
        node = _single(world.get_node(name), NodeState.STOPPED)
        due = call.now + world.timings.starting_s
        return world.with_node(replace(node, state=NodeState.STARTING, due=due))

    return run(world, request, call, _work("StartNode", "start", name), start)


def update_node(world: World, request: Json, call: Call) -> tuple[World, Operation]:
    asked = request.get("node", {})
    name = check_name(asked.get("name", ""), NODES, "node.name")
    paths = _read_mask(request.get("update_mask", ""))
    node = world.get_node(name)
    updated = replace(node, body=_merged(node.body, asked, paths))
    world, operation = run(
        world, request, call, _work("UpdateNode", "update", name), lambda w: w.with_node(updated)
    )
    world = operations.finish(world, name, ("update",), call.now, result=updated)
    return world, world.operations[operation.name]


def _single(node: Node, state: NodeState) -> Node:
    if node.accelerator.n_hosts > 1 or node.is_multislice:
        description = f"'{node.name}' has several workers: only single TPU nodes can be stopped and started"
        raise failed_precondition(node.name, "NOT_SINGLE", description)
    if node.state is not state:
        raise failed_precondition(node.name, "STATE", f"'{node.name}' is {node.state}, not {state}")
    return node


def _read_mask(mask: str) -> tuple[str, ...]:
    if not mask:
        raise invalid("update_mask", "the fields to update are required")
    # A mask's JSON form is written in camel case, also where names aren't.
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in mask)
    for path in snake.split(","):
        if path not in UPDATABLE:
            raise invalid(
                "update_mask", f"'{path}' is not one of the supported fields: {', '.join(UPDATABLE)}"
            )
    return tuple(snake.split(","))


def _merged(body: Json, asked: Json, paths: tuple[str, ...]) -> Json:
    if "description" in paths and len(asked.get("description", "")) > MAX_DESCRIPTION:
        raise invalid("node.description", f"more than {MAX_DESCRIPTION} characters")
    check_labels(asked.get("labels", {}), "node.labels")
    check_metadata(asked.get("metadata", {}), "node.metadata")
    check_tags(asked.get("tags", ()), "node.tags")
    merged: dict[str, Any] = copy.deepcopy(dict(body))
    for path in paths:
        if path == UPDATABLE[-1]:
            external = bool(asked.get("network_config", {}).get("enable_external_ips", False))
            merged["network_config"] = {**merged.get("network_config", {}), "enable_external_ips": external}
        elif path in asked:
            merged[path] = asked[path]
        else:
            merged.pop(path, None)
    return merged


def _no_capacity(zone: str) -> Status:
    message = f'There is no more capacity in the zone "{zone}"; you can try in another zone'
    return Status(code=Code.RESOURCE_EXHAUSTED, message=message, reason="ZONE_RESOURCE_POOL_EXHAUSTED")


def _work(method: str, verb: str, name: str) -> Work:
    location = parse_location(name.split(f"/{NODES}/", maxsplit=1)[0])
    return Work(method=method, verb=verb, target=name, location=location)
