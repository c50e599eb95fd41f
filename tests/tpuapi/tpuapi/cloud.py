"""A Cloud TPU API in memory, behind the operator's own interface."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

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
from tpuapi.accelerators import read_accelerator
from tpuapi.controls import Controls
from tpuapi.faults import Faults
from tpuapi.life import Operation
from tpuapi.nodes import Key, Timings
from tpuapi.rules import (
    RefusedError,
    check_labels,
    check_request,
    check_request_id,
    invalid,
    not_found,
    show_in_v2,
)

T = TypeVar("T")

_REQUEST_ID_MEMORY_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class _Answered:
    """A request that was carried out, so that it isn't again."""

    request: object
    operation: str
    at: float


class FakeCloud(Controls, Faults, CloudTPU):
    """One Cloud TPU service, which `tpuapi.wire` serves over the network."""

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        *,
        timings: Timings | None = None,
        hosts_per_node: int | None = None,
    ) -> None:
        """Make one in which there is nothing.

        Args:
            clock: Its time; None: it stands still until `step`.
            timings: How long things take.
            hosts_per_node: Hosts of each node; None: as many as its accelerator has.
        """
        Controls.__init__(self, clock, timings, hosts_per_node)
        Faults.__init__(self)
        self.created: list[str] = []
        """Ids of all queued resources that were asked for, in their order."""

        self.unlisted: set[str] = set()
        """Ids of queued resources and nodes that lists leave out."""

        self.shown: dict[str, Mapping[str, Any]] = {}
        """Fields that are sent over the network in place of what a queued resource or node has, by full name."""

        self.on_request: Callable[[str, str], None] = lambda _verb, _id: None
        """Called for each request to create, delete and label, before it is carried out."""

        self.quota_refused_at_call = True
        """Else a request beyond the quota is received, and FAILED when CREATING is over."""

        self._answered: dict[tuple[str, str], _Answered] = {}

    @override
    async def list_queued_resources(
        self, place: Place, version: ApiVersion
    ) -> tuple[CloudQueuedResource, ...]:
        def read() -> tuple[CloudQueuedResource, ...]:
            found = [r for r in self.resources.values() if r.place == place and r.id not in self.unlisted]
            return tuple(_show_resource(resource, version) for resource in found)

        return await self._ask("ListQueuedResources", version, place.parent, read)

    @override
    async def list_nodes(self, place: Place, version: ApiVersion) -> tuple[CloudNode, ...]:
        def read() -> tuple[CloudNode, ...]:
            found = [n for n in self.nodes.values() if n.place == place and n.id not in self.unlisted]
            return tuple(_show_node(node, version) for node in found)

        return await self._ask("ListNodes", version, place.parent, read)

    @override
    async def get_queued_resource(
        self, place: Place, queued_resource_id: str, version: ApiVersion
    ) -> CloudQueuedResource | None:
        def read() -> CloudQueuedResource:
            return _show_resource(_get(self.resources, place, "queuedResources", queued_resource_id), version)

        name = f"{place.parent}/queuedResources/{queued_resource_id}"
        return await self._find_out("GetQueuedResource", version, name, read)

    @override
    async def get_node(self, place: Place, node_id: str, version: ApiVersion) -> CloudNode | None:
        def read() -> CloudNode:
            return _show_node(_get(self.nodes, place, "nodes", node_id), version)

        return await self._find_out("GetNode", version, f"{place.parent}/nodes/{node_id}", read)

    @override
    async def create_queued_resource(self, request: CloudRequest) -> str:
        self.on_request("create", request.id)
        name = f"{request.place.parent}/queuedResources/{request.id}"

        def create() -> str:
            return self._once("create", name, request.request_id, request, partial(self._create, request))

        return await self._ask("CreateQueuedResource", request.api_version, name, create)

    @override
    async def delete_queued_resource(
        self, place: Place, queued_resource_id: str, *, request_id: str, version: ApiVersion
    ) -> str | None:
        self.on_request("delete", queued_resource_id)
        name = f"{place.parent}/queuedResources/{queued_resource_id}"

        def delete() -> str:
            key = (place, queued_resource_id)
            return self._once("delete", name, request_id, version, partial(self._delete, key, name))

        return await self._find_out("DeleteQueuedResource", version, name, delete)

    @override
    async def set_node_labels(
        self, place: Place, node_id: str, labels: Mapping[str, str], version: ApiVersion
    ) -> None:
        self.on_request("label", node_id)

        def update() -> None:
            check_labels(labels)
            node = _get(self.nodes, place, "nodes", node_id)
            self.nodes[place, node_id] = replace(node, labels=dict(labels))

        await self._find_out("UpdateNode", version, f"{place.parent}/nodes/{node_id}", update)

    @override
    async def get_operation(self, name: str, version: ApiVersion) -> CloudOperationState | None:
        def read() -> CloudOperationState:
            if name not in self.operations:
                raise not_found(name)
            operation = self.operations[name]
            return CloudOperationState(name=name, done=operation.done, error=operation.error)

        return await self._find_out("GetOperation", version, name, read)

    @override
    def clear_faults(self) -> None:
        super().clear_faults()
        self._failing_deletions.clear()

    async def _ask(self, method: str, version: ApiVersion, name: str, carry_out: Callable[[], T]) -> T:
        def at_its_time() -> T:
            self.advance()
            answer = carry_out()
            self.advance()
            return answer

        return await self.answer(method, version, name, at_its_time)

    async def _find_out(
        self, method: str, version: ApiVersion, name: str, carry_out: Callable[[], T]
    ) -> T | None:
        try:
            return await self._ask(method, version, name, carry_out)
        except CloudTPUError as error:
            if error.kind is ErrorKind.NOT_FOUND:
                return None
            raise

    def _once(
        self, verb: str, name: str, request_id: str, request: object, change: Callable[[], Operation]
    ) -> str:
        """Make the change once, however often it is asked for under one request id. A refusal isn't remembered."""
        check_request_id(request_id)
        before = self._answered.get((verb, request_id)) if request_id else None
        if before is not None and self.now() - before.at <= _REQUEST_ID_MEMORY_S:
            if before.request != (name, request):
                raise invalid("request_id", f"'{request_id}' was used before for a request that differs")
            return before.operation
        operation = change()
        self._answered[verb, request_id] = _Answered((name, request), operation.name, self.now())
        return operation.name

    def _create(self, request: CloudRequest) -> Operation:
        resource = CloudQueuedResource(
            place=request.place,
            id=request.id,
            state="CREATING",
            node_ids=request.node_ids,
            node=dict(request.node),
            tier=dict(request.tier),
            queueing=dict(request.queueing),
            reservation_name=request.reservation_name,
            create_time=int(self.now()),
        )
        taken = {(r.place, node_id) for r in self.resources.values() for node_id in r.node_ids}
        asked = {(request.place, node_id) for node_id in request.node_ids}
        if (request.place, request.id) in self.resources or asked & (taken | self.nodes.keys()):
            raise RefusedError(
                "ALREADY_EXISTS", f"Resource '{resource.name}' or one of its nodes already exists"
            )
        check_request(request, self.now())
        read_accelerator(request.node)
        excess = self.find_excess(resource)
        if excess is not None and self.quota_refused_at_call:
            raise excess
        self.created.append(request.id)
        self.start(resource)
        return self.begin("create", resource.name)

    def _delete(self, key: Key, name: str) -> Operation:
        resource = _get(self.resources, key[0], "queuedResources", key[1])
        if resource.state == "DELETING":
            raise RefusedError("FAILED_PRECONDITION", f"'{name}' is being deleted already")
        operation = self.begin("delete", name)
        if self._failing_deletions:
            self.fail_later(operation, self._failing_deletions.pop(0))
        else:
            self.begin_deletion(key)
        return operation


def _get(there: Mapping[Key, T], place: Place, collection: str, found_id: str) -> T:
    if (place, found_id) not in there:
        raise not_found(f"{place.parent}/{collection}/{found_id}")
    return there[place, found_id]


def _show_node(node: CloudNode, version: ApiVersion) -> CloudNode:
    if version is ApiVersion.V2ALPHA1:
        return node
    return replace(node, autocheckpoint_enabled=None, maintenance=None)


def _show_resource(resource: CloudQueuedResource, version: ApiVersion) -> CloudQueuedResource:
    if version is ApiVersion.V2ALPHA1:
        return resource
    node, tier = show_in_v2(resource.node, resource.tier)
    return replace(resource, node=node, tier=tier)
