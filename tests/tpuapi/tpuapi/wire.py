"""Serve a Cloud TPU API over the network, in google-cloud-tpu's own messages of both versions.

The generated classes have no types: what comes from them is Any here, and nowhere else.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import grpc
from google.cloud.tpu_v2.types import cloud_tpu as v2
from google.cloud.tpu_v2alpha1.types import cloud_tpu as v2alpha1
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2, json_format
from google.rpc import status_pb2
from grpc import aio
from grpc_status import rpc_status

from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudMaintenance,
    CloudNode,
    CloudQueuedResource,
    CloudRequest,
    CloudTPUError,
    Place,
)
from tpuapi.cloud import FakeCloud
from tpuapi.rules import RefusedError, invalid, not_found, number_of

T = TypeVar("T", CloudNode, CloudQueuedResource)
Answer = Callable[[Any], Awaitable[Any]]

_TYPES: Final = {ApiVersion.V2: v2, ApiVersion.V2ALPHA1: v2alpha1}
_SEVERAL: Final = {ApiVersion.V2: "multislice_params", ApiVersion.V2ALPHA1: "multi_node_params"}
_TIERS: Final = ("guaranteed", "spot", "best_effort")
_DELETED_WITHOUT_FORCE: Final = ("ACCEPTED", "WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED")
_DEFAULT_PAGE_SIZE: Final = 100
_MAX_PAGE_SIZE: Final = 1000
_TPU_PORT: Final = 8470
_LOOK_S: Final = 0.1


@contextlib.asynccontextmanager
async def serving(
    cloud: FakeCloud, host: str = "127.0.0.1", *, max_page_size: int = _MAX_PAGE_SIZE
) -> AsyncIterator[str]:
    """Answer the calls of real clients, in plaintext, while the context lasts.

    Yields:
        `host:port`.
    """
    server = aio.server()
    server.add_generic_rpc_handlers(make_services(cloud, max_page_size=max_page_size))
    bound = server.add_insecure_port(f"{host}:0")
    await server.start()
    passing = asyncio.create_task(_let_time_pass(cloud))
    try:
        yield f"{host}:{bound}"
    finally:
        passing.cancel()
        cloud.clear_faults()
        await server.stop(grace=None)


async def _let_time_pass(cloud: FakeCloud) -> None:
    """Let things happen at their time also while nobody calls."""
    while True:
        cloud.advance()
        await asyncio.sleep(_LOOK_S)


def make_services(
    cloud: FakeCloud, *, max_page_size: int = _MAX_PAGE_SIZE
) -> tuple[grpc.GenericRpcHandler, ...]:
    """Make google.cloud.tpu.v2.Tpu, google.cloud.tpu.v2alpha1.Tpu and google.longrunning.Operations."""
    services = [_TpuService(cloud, version, max_page_size) for version in ApiVersion]
    operation = grpc.unary_unary_rpc_method_handler(
        _refusing(services[0].get_operation),
        request_deserializer=operations_pb2.GetOperationRequest.FromString,
        response_serializer=_serialize,
    )
    operations = grpc.method_handlers_generic_handler(
        "google.longrunning.Operations", {"GetOperation": operation}
    )
    return (*(service.make_handler() for service in services), operations)


class _TpuService:
    """The methods of one version of the API, messages in and messages out."""

    def __init__(self, cloud: FakeCloud, version: ApiVersion, max_page_size: int) -> None:
        self._cloud = cloud
        self._version = version
        self._types: Any = _TYPES[version]
        self._max_page_size = max_page_size

    def make_handler(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Answer] = {
            "ListNodes": self.list_nodes,
            "ListQueuedResources": self.list_queued_resources,
            "GetNode": self.get_node,
            "GetQueuedResource": self.get_queued_resource,
            "CreateQueuedResource": self.create_queued_resource,
            "DeleteQueuedResource": self.delete_queued_resource,
            "UpdateNode": self.update_node,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                _refusing(method),
                request_deserializer=getattr(self._types, f"{name}Request").deserialize,
                response_serializer=_serialize,
            )
            for name, method in methods.items()
        }
        return grpc.method_handlers_generic_handler(f"google.cloud.tpu.{self._version}.Tpu", handlers)

    async def list_nodes(self, request: Any) -> Any:
        listed = await self._cloud.list_nodes(_read_place(request.parent), self._version)
        shown, token = self._cut_page(listed, request)
        answer = self._types.ListNodesResponse(next_page_token=token)
        answer.nodes.extend(self._write("Node", self._view(each)) for each in shown)
        return answer

    async def list_queued_resources(self, request: Any) -> Any:
        listed = await self._cloud.list_queued_resources(_read_place(request.parent), self._version)
        shown, token = self._cut_page(listed, request)
        answer = self._types.ListQueuedResourcesResponse(next_page_token=token)
        answer.queued_resources.extend(self._write("QueuedResource", self._view(each)) for each in shown)
        return answer

    async def get_node(self, request: Any) -> Any:
        found = await self._cloud.get_node(*_read_name(request.name), self._version)
        return self._write("Node", self._view(_known(found, request.name)))

    async def get_queued_resource(self, request: Any) -> Any:
        found = await self._cloud.get_queued_resource(*_read_name(request.name), self._version)
        return self._write("QueuedResource", self._view(_known(found, request.name)))

    async def create_queued_resource(self, request: Any) -> Any:
        asked = _read_request(type(request).pb(request), self._version)
        return operations_pb2.Operation(name=await self._cloud.create_queued_resource(asked))

    async def delete_queued_resource(self, request: Any) -> Any:
        place, resource_id = _read_name(request.name)
        found = self._cloud.resources.get((place, resource_id))
        if found is not None and not request.force and found.state not in _DELETED_WITHOUT_FORCE:
            raise RefusedError("FAILED_PRECONDITION", f"'{request.name}' is {found.state}: it needs force")
        name = await self._cloud.delete_queued_resource(
            place, resource_id, request_id=request.request_id, version=self._version
        )
        return operations_pb2.Operation(name=_known(name, request.name))

    async def update_node(self, request: Any) -> Any:
        if list(request.update_mask.paths) != ["labels"]:
            raise invalid("update_mask", "labels only")
        place, node_id = _read_name(request.node.name)
        _known(self._cloud.nodes.get((place, node_id)), request.node.name)
        await self._cloud.set_node_labels(place, node_id, dict(request.node.labels), self._version)
        return operations_pb2.Operation(name="an-update", done=True)

    async def get_operation(self, request: Any) -> Any:
        found = _known(await self._cloud.get_operation(request.name, self._version), request.name)
        operation = operations_pb2.Operation(name=found.name, done=found.done)
        if found.error is not None:
            operation.error.CopyFrom(_write_status(found.error))
        elif found.done:
            operation.response.Pack(empty_pb2.Empty())
        return operation

    def _cut_page(self, listed: Iterable[T], request: Any) -> tuple[list[T], str]:
        """Cut a page by name, so that what is created or deleted between two pages moves nothing."""
        size = min(request.page_size or _DEFAULT_PAGE_SIZE, self._max_page_size)
        rest = sorted((each for each in listed if each.id > request.page_token), key=lambda each: each.id)
        return rest[:size], rest[size - 1].id if len(rest) > size else ""

    def _view(self, value: CloudNode | CloudQueuedResource) -> dict[str, Any]:
        view = (
            view_node(value) if isinstance(value, CloudNode) else view_queued_resource(value, self._version)
        )
        return {**view, **self._cloud.shown.get(view["name"], {})}

    def _write(self, kind: str, view: dict[str, Any]) -> Any:
        """Write a message. Fields that the version doesn't have are left out."""
        message = getattr(self._types, kind)()
        json_format.ParseDict(view, type(message).pb(message), ignore_unknown_fields=True)
        return message


def view_queued_resource(resource: CloudQueuedResource, version: ApiVersion) -> dict[str, Any]:
    """Write a queued resource in the JSON form of a version's message."""
    several = len(resource.node_ids) > 1
    prefix = resource.node_ids[0].rpartition("-")[0]
    names: dict[str, Any] = {"node_id": resource.node_ids[0]}
    if several:
        names = {_SEVERAL[version]: {"node_count": len(resource.node_ids), "node_id_prefix": prefix}}
    state: dict[str, Any] = {"state": resource.state, "state_initiator": resource.initiator or 0}
    if resource.error_code:
        error = {"code": number_of(resource.error_code), "message": resource.error_message}
        state["failed_data"] = {"error": error}
    view = {
        "name": resource.name,
        "tpu": {"node_spec": [{"parent": resource.place.parent, "node": resource.node, **names}]},
        "queueing_policy": resource.queueing,
        "create_time": _write_time(resource.create_time),
        "state": state,
        **resource.tier,
    }
    return view if resource.queueing else {key: view[key] for key in view if key != "queueing_policy"}


def view_node(node: CloudNode) -> dict[str, Any]:
    """Write a node in the JSON form of messages."""
    view = {
        "name": f"{node.place.parent}/nodes/{node.id}",
        "state": node.state,
        "health": node.health or 0,
        "health_description": node.health_description,
        "labels": node.labels,
        "queued_resource": node.queued_resource,
        "autocheckpoint_enabled": bool(node.autocheckpoint_enabled),
        "network_endpoints": [{"ip_address": each, "port": _TPU_PORT} for each in node.addresses],
    }
    return (
        view if node.maintenance is None else {**view, "upcoming_maintenance": _view_window(node.maintenance)}
    )


def _view_window(window: CloudMaintenance) -> dict[str, Any]:
    return {
        "type_": window.type,
        "maintenance_status": window.status,
        "window_start_time": _write_time(window.window_start),
        "window_end_time": _write_time(window.window_end),
    }


def _read_request(message: Any, version: ApiVersion) -> CloudRequest:
    """Read a request to create a queued resource.

    Raises:
        RefusedError: It isn't of one spec, for nodes of its own place, with one way of naming them.
    """
    raw: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    asked, place = raw.get("queued_resource", {}), _read_place(raw.get("parent", ""))
    specs = asked.get("tpu", {}).get("node_spec", [])
    if len(specs) != 1 or specs[0].get("parent") != place.parent or "node" not in specs[0]:
        raise invalid("queued_resource.tpu.node_spec", "one with a node and its parent is required")
    several = specs[0].get(_SEVERAL[version])
    if (several is None) is ("node_id" not in specs[0]) or (several and several.get("node_count", 0) <= 1):
        raise invalid("node_spec", "either node_id, or the parameters of more than one node, are required")
    prefix = several and several.get("node_id_prefix", raw["queued_resource_id"])
    many = tuple(f"{prefix}-{number}" for number in range(several["node_count"])) if several else ()
    node = specs[0]["node"]
    if "accelerator_config" in node:
        config = {name.removesuffix("_"): value for name, value in node["accelerator_config"].items()}
        node = {**node, "accelerator_config": config}
    return CloudRequest(
        place=place,
        id=raw["queued_resource_id"],
        request_id=raw.get("request_id", ""),
        api_version=version,
        node_ids=many or (specs[0]["node_id"],),
        node_id_prefix=prefix,
        node=node,
        tier={tier: asked[tier] for tier in _TIERS if tier in asked},
        queueing=asked.get("queueing_policy", {}),
        reservation_name=asked.get("reservation_name"),
    )


def _read_place(parent: str) -> Place:
    match parent.split("/"):
        case ["projects", project, "locations", zone]:
            return Place(project=project, zone=zone)
        case _:
            raise invalid("parent", f"'{parent}' is not of the form projects/*/locations/*")


def _read_name(name: str) -> tuple[Place, str]:
    parent, _, found_id = name.rpartition("/")
    return _read_place(parent.rpartition("/")[0]), found_id


def _known(found: Any, name: str) -> Any:
    if found is None:
        raise not_found(name)
    return found


def _write_time(seconds: int | None) -> str | None:
    return (
        None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    )


def _write_status(error: CloudTPUError) -> status_pb2.Status:
    status = status_pb2.Status(code=number_of(error.code), message=error.message)
    for detail in getattr(error, "details", ()):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _refusing(method: Answer) -> Callable[[Any, Any], Awaitable[Any]]:
    async def answer(request: Any, context: Any) -> Any:
        try:
            return await method(request)
        except CloudTPUError as error:
            await context.abort_with_status(rpc_status.to_status(_write_status(error)))

    return answer


def _serialize(message: Any) -> bytes:
    """Serialize messages of either kind: generated by proto-plus, or by protobuf itself."""
    raw = type(message).pb(message) if hasattr(type(message), "pb") else message
    serialized: bytes = raw.SerializeToString()
    return serialized
