"""Send requests to the Cloud TPU API with google's asyncio client.

The client retries nothing by itself and gives every request a time limit: the controller decides what is tried again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping
from typing import Any, Final, TypeVar

import google.auth
import grpc
from google.api_core import client_options as google_options
from google.cloud import tpu_v2, tpu_v2alpha1
from google.longrunning import operations_pb2
from google.protobuf import field_mask_pb2, json_format

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

_SCOPES: Final = ("https://www.googleapis.com/auth/cloud-platform",)
_TIMEOUT_S: Final = 30.0
_PAGE_SIZE: Final = 500
_CREDENTIALS_RETRY_S: Final = 60.0
_VERSIONS: Final[dict[ApiVersion, Any]] = {ApiVersion.V2: tpu_v2, ApiVersion.V2ALPHA1: tpu_v2alpha1}


class GoogleCloudTPU:
    """Implement `CloudTPU` with google-cloud-tpu. Clients are made at the first request of their version."""

    def __init__(self, *, endpoint: str | None, insecure: bool) -> None:
        """Prepare to connect.

        Args:
            endpoint: host or host:port of the API; None: google's own.
            insecure: Send plaintext without credentials, to a test's server.
        """
        self._endpoint = endpoint
        self._insecure = insecure
        self._clients: dict[ApiVersion, Any] = {}
        self._credentials: Any = None
        self._refusal: tuple[float, CloudTPUError] | None = None
        """When it was found that there are no credentials, by the monotonic clock, and the error that says so."""
        if insecure:
            _log.warning(
                "requests to the Cloud TPU API are plaintext and anonymous", extra={"endpoint": endpoint}
            )

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.transport.close()
        self._clients.clear()

    async def list_queued_resources(
        self, place: Place, version: ApiVersion
    ) -> tuple[CloudQueuedResource, ...]:
        """List all queued resources of the place."""
        client, types = await self._connect(version)
        request = types.ListQueuedResourcesRequest(parent=place.parent, page_size=_PAGE_SIZE)
        pages = await self._list(client.list_queued_resources, request, place)
        return tuple(read_queued_resource(item) for page in pages for item in page.queued_resources)

    async def list_nodes(self, place: Place, version: ApiVersion) -> tuple[CloudNode, ...]:
        """List all nodes of the place."""
        client, types = await self._connect(version)
        request = types.ListNodesRequest(parent=place.parent, page_size=_PAGE_SIZE)
        pages = await self._list(client.list_nodes, request, place)
        return tuple(read_node(item, version) for page in pages for item in page.nodes)

    async def get_queued_resource(
        self, place: Place, queued_resource_id: str, version: ApiVersion
    ) -> CloudQueuedResource | None:
        """Read one queued resource. Return None if there is none."""
        client, types = await self._connect(version)
        request = types.GetQueuedResourceRequest(name=f"{place.parent}/queuedResources/{queued_resource_id}")
        answer = await _get(client.get_queued_resource(request, retry=None, timeout=_TIMEOUT_S))
        return None if answer is None else read_queued_resource(type(answer).pb(answer))

    async def get_node(self, place: Place, node_id: str, version: ApiVersion) -> CloudNode | None:
        """Read one node. Return None if there is none."""
        client, types = await self._connect(version)
        request = types.GetNodeRequest(name=f"{place.parent}/nodes/{node_id}")
        answer = await _get(client.get_node(request, retry=None, timeout=_TIMEOUT_S))
        return None if answer is None else read_node(type(answer).pb(answer), version)

    async def create_queued_resource(self, request: CloudRequest) -> str:
        """Begin to create a queued resource. Return the name of the operation."""
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
        """Begin to delete a queued resource with its nodes (force). Return the operation's name; None: it is gone."""
        client, types = await self._connect(version)
        request = types.DeleteQueuedResourceRequest(
            name=f"{place.parent}/queuedResources/{queued_resource_id}", request_id=request_id, force=True
        )
        begun = await _get(client.delete_queued_resource(request, retry=None, timeout=_TIMEOUT_S))
        return None if begun is None else str(begun.operation.name)

    async def set_node_labels(
        self, place: Place, node_id: str, labels: Mapping[str, str], version: ApiVersion
    ) -> None:
        """Begin to replace all labels of a live node. That it is gone is no error."""
        client, types = await self._connect(version)
        node = types.Node(name=f"{place.parent}/nodes/{node_id}", labels=dict(labels))
        request = types.UpdateNodeRequest(node=node, update_mask=field_mask_pb2.FieldMask(paths=["labels"]))
        await _get(client.update_node(request, retry=None, timeout=_TIMEOUT_S))

    async def get_operation(self, name: str, version: ApiVersion) -> CloudOperationState | None:
        """Look at an operation. Return None if the API has forgotten it."""
        client, _ = await self._connect(version)
        request = operations_pb2.GetOperationRequest(name=name)
        answer = await _get(client.get_operation(request, retry=None, timeout=_TIMEOUT_S))
        if answer is None:
            return None
        failed = answer.done and answer.WhichOneof("result") == "error"
        error_value = explain_status(answer.error.code, answer.error.message) if failed else None
        return CloudOperationState(name=name, done=answer.done, error=error_value)

    async def _list(self, method: Any, request: Any, place: Place) -> list[Any]:
        """Return all pages. A list that leaves out what it could not reach is an error: absence follows from it."""
        pager = await _ask(method(request, retry=None, timeout=_TIMEOUT_S))
        pages = await _ask(_collect(pager.pages))
        missing = [name for page in pages for name in page.unreachable]
        if missing:
            text = f"{place.parent} is listed in part; unreachable: {', '.join(missing)}"
            raise CloudTPUError(ErrorKind.TRANSIENT, "UNAVAILABLE", text)
        return [type(page).pb(page) for page in pages]

    async def _connect(self, version: ApiVersion) -> tuple[Any, Any]:
        """Return the client of that version and the module of its types. Raises CloudTPUError without credentials."""
        module = _VERSIONS[version]
        if version not in self._clients:
            self._clients[version] = await self._make_client(module)
        return self._clients[version], module.types

    async def _make_client(self, module: Any) -> Any:
        transport = module.TpuAsyncClient.get_transport_class("grpc_asyncio")
        if self._insecure:
            channel = grpc.aio.insecure_channel(self._endpoint)
            return module.TpuAsyncClient(transport=transport(channel=channel))
        options = google_options.ClientOptions(api_endpoint=self._endpoint)
        credentials = await self._find_credentials()
        return module.TpuAsyncClient(
            credentials=credentials, transport="grpc_asyncio", client_options=options
        )

    async def _find_credentials(self) -> Any:
        """Find this process's credentials: a mounted key, or Workload Identity. Where there are none, ask rarely."""
        if self._credentials is not None:
            return self._credentials
        now = time.monotonic()
        if self._refusal is not None and now - self._refusal[0] < _CREDENTIALS_RETRY_S:
            raise self._refusal[1]
        try:
            # It reads files and asks a metadata server, and has no asynchronous form.
            self._credentials, _ = await asyncio.to_thread(google.auth.default, scopes=_SCOPES)
        except EXPECTED as error:
            self._refusal = (now, explain_error(error))
            raise self._refusal[1] from error
        return self._credentials


async def _collect(pages: Any) -> list[Any]:
    return [page async for page in pages]


async def _get(request: Awaitable[T]) -> T | None:
    """Return the answer; None if there is nothing of that name."""
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
