"""A Cloud TPU API in memory: the operator's own interface in front of what there is, and what tests do to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar

from typing_extensions import override

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
from tpuapi.accelerators import read_accelerator
from tpuapi.faults import Faults
from tpuapi.life import Life, Operation
from tpuapi.nodes import Key, Timings, name_of
from tpuapi.rules import (
    RefusedError,
    check_labels,
    check_request,
    check_request_id,
    invalid,
    not_found,
    show_in_v2,
)

__all__ = ["FakeCloud"]

T = TypeVar("T")

_START: Final = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
_REQUEST_ID_MEMORY_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class _Answered:
    """A request that was carried out, so that it isn't again."""

    request: object
    operation: str
    at: float


class FakeCloud(Life, Faults, CloudTPU):
    """One Cloud TPU service, which `tpuapi.wire` serves over the network.

    Tests name queued resources and nodes by their ids or by their full names.
    """

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
        self._stepped = _START
        Life.__init__(self, clock or (lambda: self._stepped), timings, hosts_per_node)
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

        self._failing_deletions: list[RefusedError] = []
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

    def step(self, seconds: float) -> None:
        """Let the time of its own pass."""
        self._stepped += seconds
        self.advance()

    def step_to_next(self) -> float:
        """Let the time of its own pass until something happens by itself; return the seconds, 0 if nothing will."""
        due = self.next_due()
        seconds = 0.0 if due is None else max(0.0, due - self.now())
        self.step(seconds)
        return seconds

    def set_timings(self, **seconds: float) -> None:
        """Change how long things take that begin from now on; the names are those of Timings."""
        self.timings = replace(self.timings, **seconds)

    def set_capacity(self, accelerator: str, cores: int | None) -> None:
        """Limit what there is of a family of accelerators, such as v5litepod, or with None don't. What runs goes on."""
        _limit(self.capacity, accelerator, cores)
        self.advance()

    def set_quota(self, accelerator: str, cores: int | None) -> None:
        """Limit what may be asked for at once of a family of accelerators, or with None don't."""
        _limit(self.quotas, accelerator, cores)

    def fail_deletions(self, code: str = "INTERNAL", times: int = 1) -> None:
        """Let the next deletions be accepted, and their operations end with an error.

        What they were to delete stays as it is, and the same request under the same id is answered with them.
        """
        self._failing_deletions += [RefusedError(code, f"injected {code}")] * times

    @override
    def clear_faults(self) -> None:
        super().clear_faults()
        self._failing_deletions.clear()

    def add(self, resource: CloudQueuedResource) -> None:
        """Put a queued resource there, as somebody else would, with the nodes of its state."""
        self.resources[resource.place, resource.id] = resource
        if resource.state in {"PROVISIONING", "ACTIVE"}:
            for node_id in resource.node_ids:
                self.create_node(resource, node_id)
                if resource.state == "ACTIVE":
                    self.become_ready((resource.place, node_id))

    def fail(self, queued_resource: str, code: str = "INTERNAL", message: str = "") -> None:
        """End a queued resource as FAILED with this error."""
        self.end(self._find_by_name(queued_resource, self.resources), RefusedError(code, message))

    def suspend(self, queued_resource: str, initiator: str = "SERVICE") -> None:
        """Take all nodes of a queued resource away, where it has some."""
        self.shut_down(self._find_by_name(queued_resource, self.resources), initiator)

    def delete(self, queued_resource: str) -> None:
        """Delete a queued resource, as somebody else would who deletes what is there."""
        key = self._find_by_name(queued_resource, self.resources)
        if self.resources[key].state != "DELETING":
            self.begin_deletion(key)

    def delete_node(self, node: str) -> None:
        """Delete a node, as somebody else would; its queued resource loses all of them, by the user's doing."""
        key = self._find_by_name(node, self.nodes)
        self.remove_later(key)
        resource = self.nodes[key].queued_resource.rpartition("/")[2]
        self.shut_down((key[0], resource), "USER")

    def preempt(self, node: str, state: str = "PREEMPTED") -> None:
        """Take a node away; its queued resource is suspended a little later."""
        key = self._find_by_name(node, self.nodes)
        self.nodes[key] = replace(self.nodes[key], maintenance=None)
        self.take_away(key, state, "preempted")

    def announce_maintenance(
        self, node: str, *, starts_in_s: float, lasts_s: float = 3600.0, ends_in: str = "REPAIRING"
    ) -> None:
        """Announce a window of maintenance for a node that runs.

        Args:
            node: The node.
            starts_in_s: From now to the window's start.
            lasts_s: The window's length.
            ends_in: The node's state once it is down. REPAIRING nodes come back; TERMINATED or PREEMPTED ones don't,
                and their queued resource is suspended.
        """
        key = self._find_by_name(node, self.nodes)
        start = int(self.now() + starts_in_s)
        window = CloudMaintenance(
            type="SCHEDULED",
            status="PENDING",
            window_start=start,
            window_end=int(start + lasts_s),
            latest_window_start=start,
        )
        self.nodes[key] = replace(self.nodes[key], maintenance=window)
        self._later(
            f"{name_of(self.nodes[key])} maintenance", starts_in_s, partial(self.maintain, key, ends_in)
        )

    def processes_exited(self, node: str) -> None:
        """Report that the processes of a node with autocheckpoint have ended, so that maintenance needn't wait."""
        self.end_grace(self._find_by_name(node, self.nodes))

    def set_nodes(
        self,
        state: str | None = None,
        *,
        maintenance: CloudMaintenance | None = None,
        autocheckpoint: bool | None = None,
    ) -> None:
        """Change what is shown of all nodes, without the consequences."""
        for key, node in self.nodes.items():
            enabled = node.autocheckpoint_enabled if autocheckpoint is None else autocheckpoint
            changed = replace(node, maintenance=maintenance, autocheckpoint_enabled=enabled)
            self.nodes[key] = replace(changed, state=state or node.state)

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

    def _find_by_name(self, name: str, there: Mapping[Key, Any]) -> Key:
        """Find by an id, or by a full name.

        Raises:
            LookupError: There is none, or several.
        """
        self.advance()
        found = [key for key in there if key[1] == name.rpartition("/")[2]]
        if len(found) != 1:
            raise LookupError(
                f"{len(found)} are named '{name}': {', '.join(key[1] for key in there) or 'none'}"
            )
        return found[0]


def _get(there: Mapping[Key, T], place: Place, collection: str, found_id: str) -> T:
    if (place, found_id) not in there:
        raise not_found(f"{place.parent}/{collection}/{found_id}")
    return there[place, found_id]


def _limit(limits: dict[str, int], accelerator: str, cores: int | None) -> None:
    if cores is None:
        limits.pop(accelerator, None)
    else:
        limits[accelerator] = cores


def _show_node(node: CloudNode, version: ApiVersion) -> CloudNode:
    if version is ApiVersion.V2ALPHA1:
        return node
    return replace(node, autocheckpoint_enabled=None, maintenance=None)


def _show_resource(resource: CloudQueuedResource, version: ApiVersion) -> CloudQueuedResource:
    if version is ApiVersion.V2ALPHA1:
        return resource
    node, tier = show_in_v2(resource.node, resource.tier)
    return replace(resource, node=node, tier=tier)
