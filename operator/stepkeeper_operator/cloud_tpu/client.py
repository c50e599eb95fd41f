"""Send requests to the Cloud TPU API with Google's asyncio client.

The client retries nothing and gives every request a time limit: the controller decides about retries.
"""

import logging
from collections.abc import Awaitable, Mapping
from typing import Any, Final, TypeVar

import grpc
from google.cloud import tpu_v2, tpu_v2alpha1
from google.longrunning import operations_pb2
from google.protobuf import field_mask_pb2, json_format

from stepkeeper_operator.cloud_tpu.authorization import Authorization
from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudNode,
    CloudOperationState,
    CloudQueuedResource,
    CloudRequest,
    CloudTPUError,
    ErrorKind,
    Place,
)
from stepkeeper_operator.cloud_tpu.convert import build_queued_resource, read_node, read_queued_resource
from stepkeeper_operator.cloud_tpu.errors import EXPECTED, explain_error, explain_status

__all__ = ["GoogleCloudTPU"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_HOST: Final = "tpu.googleapis.com"
_HTTPS_PORT: Final = 443
_ANY_SIZE: Final = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
"""A list contains the startup script of each of its nodes."""

_TIMEOUT_S: Final = 30.0
_GET_TIMEOUT_S: Final = 10.0
_PAGE_SIZE: Final = 500
_VERSIONS: Final[dict[ApiVersion, Any]] = {ApiVersion.V2: tpu_v2, ApiVersion.V2ALPHA1: tpu_v2alpha1}


class GoogleCloudTPU:
    """Implement `CloudTPU` with google-cloud-tpu. The client of each version is made at its first request.

    `endpoint` is host or host:port of the API; None: Google's own. With `insecure`, requests to a test server are sent
    in plaintext, without credentials.
    """

    def __init__(self, *, endpoint: str | None, insecure: bool) -> None:
        self._endpoint = endpoint or _HOST
        self._authorization = None if insecure else Authorization(self._endpoint)
        self._clients: dict[ApiVersion, Any] = {}
        if insecure:
            text = "requests to the Cloud TPU API are sent in plaintext without credentials"
            _log.warning(text, extra={"endpoint": endpoint})

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.transport.close()
        self._clients.clear()

    async def list_queued_resources(
        self, place: Place, version: ApiVersion
    ) -> tuple[CloudQueuedResource, ...]:
        client, types = await self._connect(version)
        request = types.ListQueuedResourcesRequest(parent=place.parent, page_size=_PAGE_SIZE)
        pages = await self._list(client.list_queued_resources, request, place)
        return tuple(read_queued_resource(item) for page in pages for item in page.queued_resources)

    async def list_nodes(self, place: Place, version: ApiVersion) -> tuple[CloudNode, ...]:
        client, types = await self._connect(version)
        request = types.ListNodesRequest(parent=place.parent, page_size=_PAGE_SIZE)
        pages = await self._list(client.list_nodes, request, place)
        return tuple(read_node(item, version) for page in pages for item in page.nodes)

    async def get_queued_resource(
        self, place: Place, queued_resource_id: str, version: ApiVersion
    ) -> CloudQueuedResource | None:
        client, types = await self._connect(version)
        request = types.GetQueuedResourceRequest(name=f"{place.parent}/queuedResources/{queued_resource_id}")
        answer = await _get(client.get_queued_resource(request, retry=None, timeout=_GET_TIMEOUT_S))
        return None if answer is None else read_queued_resource(type(answer).pb(answer))

    async def get_node(self, place: Place, node_id: str, version: ApiVersion) -> CloudNode | None:
        client, types = await self._connect(version)
        request = types.GetNodeRequest(name=f"{place.parent}/nodes/{node_id}")
        answer = await _get(client.get_node(request, retry=None, timeout=_GET_TIMEOUT_S))
        return None if answer is None else read_node(type(answer).pb(answer), version)

    async def create_queued_resource(self, request: CloudRequest) -> str:
        client, types = await self._connect(request.api_version)
        message = types.CreateQueuedResourceRequest(
            parent=request.place.parent, queued_resource_id=request.id, request_id=request.request_id
        )
        try:
            build_queued_resource(request, types.CreateQueuedResourceRequest.pb(message).queued_resource)
        except json_format.ParseError as error:
            raise CloudTPUError(ErrorKind.TERMINAL, "INVALID_ARGUMENT", str(error)) from error
        begun = await _ask(client.create_queued_resource(message, retry=None, timeout=_TIMEOUT_S))
        return str(begun.operation.name)

    async def delete_queued_resource(
        self, place: Place, queued_resource_id: str, *, request_id: str, version: ApiVersion
    ) -> str | None:
        client, types = await self._connect(version)
        request = types.DeleteQueuedResourceRequest(
            name=f"{place.parent}/queuedResources/{queued_resource_id}", request_id=request_id, force=True
        )
        begun = await _get(client.delete_queued_resource(request, retry=None, timeout=_TIMEOUT_S))
        return None if begun is None else str(begun.operation.name)

    async def set_node_labels(
        self, place: Place, node_id: str, labels: Mapping[str, str], version: ApiVersion
    ) -> None:
        client, types = await self._connect(version)
        node = types.Node(name=f"{place.parent}/nodes/{node_id}", labels=dict(labels))
        request = types.UpdateNodeRequest(node=node, update_mask=field_mask_pb2.FieldMask(paths=["labels"]))
        await _get(client.update_node(request, retry=None, timeout=_TIMEOUT_S))

    async def get_operation(self, name: str, version: ApiVersion) -> CloudOperationState | None:
        client, _ = await self._connect(version)
        request = operations_pb2.GetOperationRequest(name=name)
        answer = await _get(client.get_operation(request, retry=None, timeout=_GET_TIMEOUT_S))
        if answer is None:
            return None
        failed = answer.done and answer.WhichOneof("result") == "error"
        error_value = explain_status(answer.error.code, answer.error.message) if failed else None
        return CloudOperationState(name=name, done=answer.done, error=error_value)

    async def _list(self, method: Any, request: Any, place: Place) -> list[Any]:
        """Return all pages. A partial list is an error: callers treat a resource that isn't listed as absent."""
        pager = await _ask(method(request, retry=None, timeout=_TIMEOUT_S))
        pages = await _ask(_collect(pager.pages))
        missing = [name for page in pages for name in page.unreachable]
        if missing:
            text = f"the list of {place.parent} is incomplete; unreachable: {', '.join(missing)}"
            raise CloudTPUError(ErrorKind.TRANSIENT, "UNAVAILABLE", text)
        return [type(page).pb(page) for page in pages]  # `pb` unwraps the protobuf message

    async def _connect(self, version: ApiVersion) -> tuple[Any, Any]:
        """Return the client of that version and the module of its types. Raises CloudTPUError if there is no token."""
        if self._authorization is not None:
            await self._authorization.renew()
        module = _VERSIONS[version]
        if version not in self._clients:
            transport = module.TpuAsyncClient.get_transport_class("grpc_asyncio")
            self._clients[version] = module.TpuAsyncClient(transport=transport(channel=self._open_channel()))
        return self._clients[version], module.types

    def _open_channel(self) -> Any:
        if self._authorization is None:
            return grpc.aio.insecure_channel(self._endpoint, options=_ANY_SIZE)
        target = self._endpoint if ":" in self._endpoint else f"{self._endpoint}:{_HTTPS_PORT}"
        token = grpc.metadata_call_credentials(self._authorization.provide_headers)
        secure = grpc.composite_channel_credentials(grpc.ssl_channel_credentials(), token)
        return grpc.aio.secure_channel(target, secure, options=_ANY_SIZE)


async def _collect(pages: Any) -> list[Any]:
    return [page async for page in pages]


async def _get(request: Awaitable[T]) -> T | None:
    """Return the answer; None if the object is not found."""
    try:
        return await _ask(request)
    except CloudTPUError as error:
        if error.kind is ErrorKind.NOT_FOUND:
            return None
        raise


async def _ask(request: Awaitable[T]) -> T:
    try:
        return await request
    except EXPECTED as error:
        raise explain_error(error) from error
