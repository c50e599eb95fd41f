"""Count the requests to the Cloud TPU API, by method and by the code of the answer."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar

from typing_extensions import override

from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudNode,
    CloudOperationState,
    CloudQueuedResource,
    CloudRequest,
    CloudTPU,
    CloudTPUError,
    Place,
)

__all__ = ["CountingCloudTPU"]

T = TypeVar("T")

_OK: Final = "OK"
_NOT_FOUND: Final = "NOT_FOUND"


class CountingCloudTPU(CloudTPU):
    """Pass every request on, and tell `count` its method, as the API names it, and the answer's gRPC code.

    A list counts once, however many pages it has.
    """

    def __init__(self, cloud: CloudTPU, count: Callable[[str, str], None]) -> None:
        self._cloud = cloud
        self._count = count

    @override
    async def list_queued_resources(
        self, place: Place, version: ApiVersion
    ) -> tuple[CloudQueuedResource, ...]:
        request = self._cloud.list_queued_resources(place, version)
        return await self._counted("ListQueuedResources", request)

    @override
    async def list_nodes(self, place: Place, version: ApiVersion) -> tuple[CloudNode, ...]:
        return await self._counted("ListNodes", self._cloud.list_nodes(place, version))

    @override
    async def get_queued_resource(
        self, place: Place, queued_resource_id: str, version: ApiVersion
    ) -> CloudQueuedResource | None:
        request = self._cloud.get_queued_resource(place, queued_resource_id, version)
        return await self._counted("GetQueuedResource", request)

    @override
    async def get_node(self, place: Place, node_id: str, version: ApiVersion) -> CloudNode | None:
        return await self._counted("GetNode", self._cloud.get_node(place, node_id, version))

    @override
    async def create_queued_resource(self, request: CloudRequest) -> str:
        return await self._counted("CreateQueuedResource", self._cloud.create_queued_resource(request))

    @override
    async def delete_queued_resource(
        self, place: Place, queued_resource_id: str, *, request_id: str, version: ApiVersion
    ) -> str | None:
        request = self._cloud.delete_queued_resource(
            place, queued_resource_id, request_id=request_id, version=version
        )
        return await self._counted("DeleteQueuedResource", request)

    @override
    async def set_node_labels(
        self, place: Place, node_id: str, labels: Mapping[str, str], version: ApiVersion
    ) -> None:
        async def update() -> bool:
            await self._cloud.set_node_labels(place, node_id, labels, version)
            return True

        await self._counted("UpdateNode", update())

    @override
    async def get_operation(self, name: str, version: ApiVersion) -> CloudOperationState | None:
        return await self._counted("GetOperation", self._cloud.get_operation(name, version))

    async def _counted(self, method: str, request: Awaitable[T]) -> T:
        try:
            answer = await request
        except CloudTPUError as error:
            self._count(method, error.code)
            raise
        self._count(method, _NOT_FOUND if answer is None else _OK)
        return answer
