"""Keep queued resources and nodes in memory: `CloudTPU` without a server. Time passes when `advance` is called.

The API of tests/tpuapi is the service as its protos describe it; every test of what the service does has that one. This
one has no rules: it takes any state, in any order, also those that the service shows nobody (a slice without its
resource, a list that says otherwise than an answer by name), so that a decision can be tested on what can't be played.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from typing_extensions import override

from fake_cluster.cloud.nodes import make_node, show_node
from fake_cluster.cloud.planned_faults import PlannedFaults
from stepkeeper_operator.cloud_tpu.cloud import (
    ApiVersion,
    CloudMaintenance,
    CloudNode,
    CloudOperationState,
    CloudQueuedResource,
    CloudRequest,
    CloudTPU,
    CloudTPUError,
    ErrorKind,
    Place,
)

__all__ = ["SmallCloud"]

_NEXT = {
    "CREATING": "WAITING_FOR_RESOURCES",
    "ACCEPTED": "WAITING_FOR_RESOURCES",
    "WAITING_FOR_RESOURCES": "PROVISIONING",
    "PROVISIONING": "ACTIVE",
    "SUSPENDING": "SUSPENDED",
}
_WITH_NODES = {"PROVISIONING", "ACTIVE", "SUSPENDING", "SUSPENDED"}


class SmallCloud(PlannedFaults, CloudTPU):
    """Carry out requests at once and their consequences one `advance` at a time."""

    def __init__(self, clock: Callable[[], float], *, hosts_per_node: int = 1) -> None:
        self._clock = clock
        self._hosts = hosts_per_node
        self._operations: dict[str, CloudOperationState] = {}
        self._answered: dict[str, str] = {}
        self._serial = 0
        super().__init__()
        self.resources: dict[tuple[Place, str], CloudQueuedResource] = {}
        self.nodes: dict[tuple[Place, str], CloudNode] = {}
        self.quota: int | None = None
        """Nodes that may exist or be asked for at once; None: any number."""

        self.created: list[str] = []
        """Ids of all resources that were created, in their order."""

        self.answers = asyncio.Event()
        """Cleared: lists wait until it is set."""

        self.answers.set()
        self.n_lists = 0
        """Lists of queued resources that were answered."""

        self.n_gets = 0
        """Resources and nodes that were asked for by name."""

        self.unlisted: set[str] = set()
        """Ids of resources and nodes that lists leave out."""

        self.stays: set[str] = set()
        """Ids of resources whose deletion doesn't come to an end."""

        self.operation_error: CloudTPUError | None = None
        """The error that operations end with."""

        self.on_request: Callable[[str, str], None] = lambda _verb, _id: None
        """Called for each request to create, delete and label, before it is carried out."""

    @override
    async def list_queued_resources(
        self, place: Place, version: ApiVersion
    ) -> tuple[CloudQueuedResource, ...]:
        await self.answers.wait()
        self._fail_list(version)
        self.n_lists += 1
        found = [resource for (at, _), resource in self.resources.items() if at == place]
        return tuple(resource for resource in found if resource.id not in self.unlisted)

    @override
    async def list_nodes(self, place: Place, version: ApiVersion) -> tuple[CloudNode, ...]:
        self._fail_list(version)
        nodes = [node for (at, _), node in self.nodes.items() if at == place and node.id not in self.unlisted]
        return tuple(show_node(node, version) for node in nodes)

    @override
    async def get_queued_resource(
        self, place: Place, queued_resource_id: str, version: ApiVersion
    ) -> CloudQueuedResource | None:
        self.n_gets += 1
        self._fail("get")
        return self.resources.get((place, queued_resource_id))

    @override
    async def get_node(self, place: Place, node_id: str, version: ApiVersion) -> CloudNode | None:
        self.n_gets += 1
        self._fail("get")
        self._fail("get_node")
        node = self.nodes.get((place, node_id))
        return None if node is None else show_node(node, version)

    @override
    async def create_queued_resource(self, request: CloudRequest) -> str:
        self.on_request("create", request.id)
        error = self._take_fault("create")
        if error is not None and not error[1]:
            raise error[0]
        operation = self._create(request)
        if error is not None:
            raise error[0]
        return operation

    @override
    async def delete_queued_resource(
        self, place: Place, queued_resource_id: str, *, request_id: str, version: ApiVersion
    ) -> str | None:
        self.on_request("delete", queued_resource_id)
        error = self._take_fault("delete")
        if error is not None and not error[1]:
            raise error[0]
        found = self.resources.get((place, queued_resource_id))
        operation = None
        if found is not None:
            self.resources[place, queued_resource_id] = replace(found, state="DELETING")
            operation = self._begin_operation()
        if error is not None:
            raise error[0]
        return operation

    @override
    async def set_node_labels(
        self, place: Place, node_id: str, labels: Mapping[str, str], version: ApiVersion
    ) -> None:
        self.on_request("label", node_id)
        self._fail("label")
        known = self.nodes.get((place, node_id))
        if known is not None:
            self.nodes[place, node_id] = replace(known, labels=dict(labels))

    @override
    async def get_operation(self, name: str, version: ApiVersion) -> CloudOperationState | None:
        self._fail("operation")
        return self._operations.get(name)

    def advance(self) -> None:
        """Let every resource go one state further, every node become ready, and every operation end."""
        self.finish_operations()
        for key, resource in list(self.resources.items()):
            if resource.state == "DELETING":
                if resource.id not in self.stays:
                    self._remove(key)
            elif resource.state in _NEXT:
                self.set_state(key[1], _NEXT[resource.state])

    def finish_operations(self) -> None:
        """Let every operation end."""
        for name, operation in self._operations.items():
            if not operation.done:
                self._operations[name] = replace(operation, done=True, error=self.operation_error)

    def set_state(self, cloud_id: str, state: str, *, error: tuple[str, str] = ("", "")) -> None:
        """Bring a resource into a state, with the nodes that belong to it."""
        for key, resource in list(self.resources.items()):
            if key[1] != cloud_id:
                continue
            changed = replace(
                resource, state=state, initiator="SERVICE", error_code=error[0], error_message=error[1]
            )
            self.resources[key] = changed
            self._update_nodes(changed)

    def set_nodes(
        self,
        state: str | None = None,
        *,
        maintenance: CloudMaintenance | None = None,
        autocheckpoint: bool | None = None,
    ) -> None:
        """Change all nodes."""
        for key, node in self.nodes.items():
            changed = replace(node, maintenance=maintenance)
            if state is not None:
                changed = replace(changed, state=state)
            if autocheckpoint is not None:
                changed = replace(changed, autocheckpoint_enabled=autocheckpoint)
            self.nodes[key] = changed

    def add(self, resource: CloudQueuedResource) -> None:
        """Put a resource there as somebody else would."""
        self.resources[resource.place, resource.id] = resource
        self._update_nodes(resource)

    def _create(self, request: CloudRequest) -> str:
        if request.request_id in self._answered:
            return self._answered[request.request_id]
        key = (request.place, request.id)
        if key in self.resources:
            raise CloudTPUError(ErrorKind.ALREADY_EXISTS, "ALREADY_EXISTS", f"{request.id} exists")
        used = sum(len(resource.node_ids) for resource in self.resources.values())
        if self.quota is not None and used + len(request.node_ids) > self.quota:
            raise CloudTPUError(ErrorKind.QUOTA, "RESOURCE_EXHAUSTED", "quota TPUV5sLitepod is exhausted")
        self.resources[key] = CloudQueuedResource(
            place=request.place,
            id=request.id,
            state="CREATING",
            node_ids=request.node_ids,
            node=dict(request.node),
            tier=dict(request.tier),
            queueing=dict(request.queueing),
            reservation_name=request.reservation_name,
            create_time=int(self._clock()),
        )
        self.created.append(request.id)
        self._answered[request.request_id] = operation = self._begin_operation()
        return operation

    def _begin_operation(self) -> str:
        self._serial += 1
        name = f"operations/{self._serial}"
        self._operations[name] = CloudOperationState(name=name, done=False)
        return name

    def _update_nodes(self, resource: CloudQueuedResource) -> None:
        place = resource.place
        if resource.state not in _WITH_NODES:
            return
        state = {"ACTIVE": "READY", "PROVISIONING": "CREATING"}.get(resource.state, "TERMINATED")
        for node_id in resource.node_ids:
            known = self.nodes.get((place, node_id))
            if known is not None:
                self.nodes[place, node_id] = replace(known, state=state)
                continue
            self.nodes[place, node_id] = make_node(resource, node_id, state, n_hosts=self._hosts)

    def _remove(self, key: tuple[Place, str]) -> None:
        resource = self.resources.pop(key)
        for node_key in [k for k, node in self.nodes.items() if node.queued_resource == resource.name]:
            del self.nodes[node_key]
