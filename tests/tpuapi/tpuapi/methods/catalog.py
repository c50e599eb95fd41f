"""The methods that tell what the service offers, and its long-running operations."""

from dataclasses import replace

from tpuapi.core import accelerators
from tpuapi.core.errors import not_found
from tpuapi.core.names import OPERATIONS, RESERVATIONS, check_name, parse_location
from tpuapi.core.paging import Page, page_of
from tpuapi.core.values import Json, Operation
from tpuapi.core.world import World
from tpuapi.methods.answering import Call


def list_accelerator_types(world: World, request: Json, _: Call) -> tuple[World, Page[Json]]:
    parent = parse_location(request.get("parent", ""))
    names = [(parent.name("acceleratorTypes", each), each) for each in accelerators.all_types()]
    named: list[tuple[str, Json]] = [(name, {"name": name, "type_": each}) for name, each in names]
    return world, page_of(world, parent, named, request)


def list_runtime_versions(world: World, request: Json, _: Call) -> tuple[World, Page[Json]]:
    parent = parse_location(request.get("parent", ""))
    names = [(parent.name("runtimeVersions", each), each) for each in world.runtime_versions]
    named: list[tuple[str, Json]] = [(name, {"name": name, "version": each}) for name, each in names]
    return world, page_of(world, parent, named, request)


def list_reservations(world: World, request: Json, _: Call) -> tuple[World, Page[Json]]:
    parent = parse_location(request.get("parent", ""))
    named = [
        (name, body)
        for name, body in world.reservations.items()
        if parent.holds(parse_location(name.split(f"/{RESERVATIONS}/", maxsplit=1)[0]))
    ]
    return world, page_of(world, parent, named, request)


def get_operation(world: World, request: Json, _: Call) -> tuple[World, Operation]:
    return world, _operation(world, request)


def list_operations(world: World, request: Json, _: Call) -> tuple[World, Page[Operation]]:
    parent = parse_location(request.get("name", ""), "name")
    named = [(each.name, each) for each in world.operations.values() if parent.holds(each.location)]
    return world, page_of(world, parent, named, request)


def cancel_operation(world: World, request: Json, _: Call) -> tuple[World, None]:
    """Note the wish. The service makes no effort to fulfil it."""
    operation = _operation(world, request)
    return world.with_operation(replace(operation, cancel_requested=True)), None


def delete_operation(world: World, request: Json, _: Call) -> tuple[World, None]:
    """Forget the operation; what it does goes on."""
    name = _operation(world, request).name
    return replace(world, operations={key: o for key, o in world.operations.items() if key != name}), None


def _operation(world: World, request: Json) -> Operation:
    name = check_name(request.get("name", ""), OPERATIONS)
    if name not in world.operations:
        raise not_found(name)
    return world.operations[name]
