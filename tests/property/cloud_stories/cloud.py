"""Ask the Cloud TPU API of tests/tpuapi in this process: its own engine and messages, without a network between."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from typing_extensions import override

from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudNode,
    CloudOperationState,
    CloudQueuedResource,
    CloudRequest,
    CloudTPU,
    CloudTPUError,
    ErrorKind,
    Place,
)
from stepkeeper_operator.cloud_tpu.convert import build_queued_resource, read_node, read_queued_resource
from stepkeeper_operator.cloud_tpu.errors import explain_status
from tpuapi.core.errors import ApiError, Status
from tpuapi.core.values import Json, Version
from tpuapi.core.world import Timings
from tpuapi.fake import FakeTpu
from tpuapi.methods.answering import Answer
from tpuapi.wire.versions import TYPES, read_message, write_node, write_queued

__all__ = ["EngineCloud"]

_TIMINGS: Final = Timings(provisioning_s=40, preempted_s=45)
_REMEMBERED: Final = 500
_READERS: Final[dict[str, Callable[[Version, Any], Any]]] = {
    "QueuedResource": lambda version, value: read_queued_resource(_raw(write_queued(version, value))),
    "Node": lambda version, value: read_node(_raw(write_node(version, value)), ApiVersion(version.value)),
}


class EngineCloud(CloudTPU):
    """Implement `CloudTPU` over the engine of a `FakeTpu`, whose time is the caller's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.tpu = FakeTpu(_SharedClock(clock), timings=_TIMINGS)
        self.unlisted: set[str] = set()
        """Ids of resources and nodes that lists leave out."""

        self.slow_s = 0.0
        """Seconds that each list takes. It has what there was when it began."""

        self._slow: list[tuple[float, asyncio.Event]] = []
        """Lists that go on: when each ends, and what tells it."""

        self.on_request: Callable[[str, str], None] = lambda _verb, _id: None
        """Called for each request to create and delete, before it is carried out."""

        self._read: dict[tuple[int, Version], tuple[object, Any]] = {}

    @override
    async def list_queued_resources(
        self, place: Place, version: ApiVersion
    ) -> tuple[CloudQueuedResource, ...]:
        return await self._list("ListQueuedResources", place, version)

    @override
    async def list_nodes(self, place: Place, version: ApiVersion) -> tuple[CloudNode, ...]:
        return await self._list("ListNodes", place, version)

    @override
    async def get_queued_resource(
        self, place: Place, queued_resource_id: str, version: ApiVersion
    ) -> CloudQueuedResource | None:
        name = f"{place.parent}/queuedResources/{queued_resource_id}"
        found: CloudQueuedResource | None = await self._get("GetQueuedResource", name, version)
        return found

    @override
    async def get_node(self, place: Place, node_id: str, version: ApiVersion) -> CloudNode | None:
        found: CloudNode | None = await self._get("GetNode", f"{place.parent}/nodes/{node_id}", version)
        return found

    @override
    async def create_queued_resource(self, request: CloudRequest) -> str:
        self.on_request("create", request.id)
        types = TYPES[Version(request.api_version.value)]
        message = types.CreateQueuedResourceRequest(
            parent=request.place.parent, queued_resource_id=request.id, request_id=request.request_id
        )
        build_queued_resource(request, _raw(message).queued_resource)
        return await self._begin("CreateQueuedResource", request.api_version, message)

    @override
    async def delete_queued_resource(
        self, place: Place, queued_resource_id: str, *, request_id: str, version: ApiVersion
    ) -> str | None:
        self.on_request("delete", queued_resource_id)
        name = f"{place.parent}/queuedResources/{queued_resource_id}"
        types = TYPES[Version(version.value)]
        message = types.DeleteQueuedResourceRequest(name=name, request_id=request_id, force=True)
        try:
            return await self._begin("DeleteQueuedResource", version, message)
        except CloudTPUError as error:
            if error.kind is ErrorKind.NOT_FOUND:
                return None
            raise

    @override
    async def set_node_labels(
        self, place: Place, node_id: str, labels: Mapping[str, str], version: ApiVersion
    ) -> None:
        node = {"name": f"{place.parent}/nodes/{node_id}", "labels": dict(labels)}
        try:
            await self._invoke("UpdateNode", version, {"node": node, "update_mask": "labels"})
        except CloudTPUError as error:
            if error.kind is not ErrorKind.NOT_FOUND:
                raise

    @override
    async def get_operation(self, name: str, version: ApiVersion) -> CloudOperationState | None:
        try:
            found: Any = await self._invoke("GetOperation", version, {"name": name})
        except CloudTPUError as error:
            if error.kind is ErrorKind.NOT_FOUND:
                return None
            raise
        error_value = None if found.error is None else _explain(found.error)
        return CloudOperationState(name=name, done=found.end_time is not None, error=error_value)

    def end_lists(self) -> None:
        """Let the lists end whose time is over."""
        now = self._clock()
        for ends_at, end in self._slow:
            if ends_at <= now:
                end.set()
        self._slow = [each for each in self._slow if not each[1].is_set()]

    async def _take_time(self) -> None:
        if self.slow_s:
            end = asyncio.Event()
            self._slow.append((self._clock() + self.slow_s, end))
            await end.wait()

    async def _list(self, method: str, place: Place, version: ApiVersion) -> tuple[Any, ...]:
        page: Any = await self._invoke(method, version, {"parent": place.parent, "page_size": 500})
        await self._take_time()
        assert not page.next_page_token, "no story has so many"
        items = (self._convert(item, version) for item in page.items)
        return tuple(item for item in items if item.id not in self.unlisted)

    async def _get(self, method: str, name: str, version: ApiVersion) -> Any:
        try:
            return self._convert(await self._invoke(method, version, {"name": name}), version)
        except CloudTPUError as error:
            if error.kind is ErrorKind.NOT_FOUND:
                return None
            raise

    async def _begin(self, method: str, version: ApiVersion, message: Any) -> str:
        begun: Any = await self._invoke(method, version, read_message(Version(version.value), message))
        return str(begun.name)

    async def _invoke(self, method: str, version: ApiVersion, request: Json) -> Answer:
        try:
            return await self.tpu.engine.invoke(method, Version(version.value), request)
        except ApiError as error:
            raise _explain(error.status) from error

    def _convert(self, value: Any, version: ApiVersion) -> Any:
        """Read the message that a value makes. A value never changes, so what was read of it is kept."""
        key = (id(value), Version(version.value))
        if key not in self._read:
            if len(self._read) > _REMEMBERED:
                self._read.clear()
            self._read[key] = (value, _READERS[type(value).__name__](key[1], value))
        return self._read[key][1]


class _SharedClock:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def now(self) -> float:
        return self._clock()


def _explain(status: Status) -> CloudTPUError:
    return explain_status(int(status.code), status.message)


def _raw(message: Any) -> Any:
    return type(message).pb(message)
