"""The methods of both services by their names on the wire, and how their answers are written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from tpuapi.core.paging import Page
from tpuapi.core.values import Json, Node, Operation, QueuedResource, Version
from tpuapi.methods import catalog, maintenance, nodes, queued_resources
from tpuapi.methods.answering import Answer, Method
from tpuapi.wire.versions import write_message, write_node, write_operation, write_queued


@dataclass(frozen=True, slots=True)
class Rpc:
    """One method of the Tpu services; its request is named after it."""

    method: Method
    items: str = ""
    """The repeated field of a list's answer."""
    versions: tuple[Version, ...] = (Version.V2, Version.V2ALPHA1)


ALPHA = (Version.V2ALPHA1,)

TPU_METHODS = {
    "ListNodes": Rpc(nodes.list_nodes, "nodes"),
    "GetNode": Rpc(nodes.get_node),
    "CreateNode": Rpc(nodes.create_node),
    "DeleteNode": Rpc(nodes.delete_node),
    "StopNode": Rpc(nodes.stop_node),
    "StartNode": Rpc(nodes.start_node),
    "UpdateNode": Rpc(nodes.update_node),
    "ListQueuedResources": Rpc(queued_resources.list_queued_resources, "queued_resources"),
    "GetQueuedResource": Rpc(queued_resources.get_queued_resource),
    "CreateQueuedResource": Rpc(queued_resources.create_queued_resource),
    "DeleteQueuedResource": Rpc(queued_resources.delete_queued_resource),
    "ResetQueuedResource": Rpc(queued_resources.reset_queued_resource),
    "ListAcceleratorTypes": Rpc(catalog.list_accelerator_types, "accelerator_types"),
    "ListRuntimeVersions": Rpc(catalog.list_runtime_versions, "runtime_versions"),
    "PerformMaintenance": Rpc(maintenance.perform_maintenance, versions=ALPHA),
    "PerformMaintenanceQueuedResource": Rpc(
        queued_resources.perform_maintenance_queued_resource, versions=ALPHA
    ),
    "ListReservations": Rpc(catalog.list_reservations, "reservations", versions=ALPHA),
    "SimulateMaintenanceEvent": Rpc(maintenance.simulate_maintenance_event, versions=ALPHA),
}

OPERATION_METHODS: dict[str, Method] = {
    "GetOperation": catalog.get_operation,
    "ListOperations": catalog.list_operations,
    "CancelOperation": catalog.cancel_operation,
    "DeleteOperation": catalog.delete_operation,
}

METHODS: dict[str, Method] = {
    **{name: rpc.method for name, rpc in TPU_METHODS.items()},
    **OPERATION_METHODS,
}

_WRITERS: dict[str, Callable[[Version, Any], Any]] = {"nodes": write_node, "queued_resources": write_queued}


def write_answer(version: Version, rpc_name: str, answer: Answer) -> Any:
    """Write what a method of the Tpu service answers as a message of the version."""
    match answer:
        case Operation() as operation:
            return write_operation(operation)
        case QueuedResource() as resource:
            return write_queued(version, resource)
        case Node() as node:
            return write_node(version, node)
        case Page() as page:
            return _write_page(version, rpc_name, page)
        case _:
            raise TypeError(f"{rpc_name} answers with {type(answer).__name__}, which the wire doesn't know")


def write_operations_answer(answer: object) -> Any:
    """Write what a method of the Operations service answers."""
    match answer:
        case Operation() as operation:
            return write_operation(operation)
        case Page() as page:
            written = [write_operation(operation) for operation in page.items]
            return operations_pb2.ListOperationsResponse(
                operations=written, next_page_token=page.next_page_token
            )
        case _:
            return empty_pb2.Empty()


def _write_page(version: Version, rpc_name: str, page: Page[Any]) -> Any:
    field = TPU_METHODS[rpc_name].items
    envelope: dict[str, Any] = {
        "next_page_token": page.next_page_token,
        "unreachable": list(page.unreachable),
    }
    write = _WRITERS.get(field)
    if write is None:
        items: list[Json] = list(page.items)
        return write_message(version, f"{rpc_name}Response", {**envelope, field: items})
    response = write_message(version, f"{rpc_name}Response", envelope)
    getattr(response, field).extend(write(version, item) for item in page.items)
    return response
