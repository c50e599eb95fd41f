"""Let queued resources and their nodes pass through their states while time goes by."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from typing_extensions import override

from stepkeeper_operator.cloud_tpu.cloud import CloudNode, CloudQueuedResource, CloudTPUError
from tpuapi.accelerators import read_accelerator
from tpuapi.nodes import ENDED, Key, Nodes, Timings, name_of
from tpuapi.rules import RefusedError, quota_exceeded, read_window


@dataclass(slots=True, kw_only=True)
class Operation:
    """A long-running operation on a queued resource."""

    name: str
    verb: str
    target: str
    done: bool = False
    error: CloudTPUError | None = None


class Life(Nodes):
    """Keep what there is, and what is going to happen to it by itself. Tests may change what there is as they like."""

    def __init__(
        self, clock: Callable[[], float], timings: Timings | None, hosts_per_node: int | None
    ) -> None:
        super().__init__(clock, timings, hosts_per_node)
        self.resources: dict[Key, CloudQueuedResource] = {}
        """In the order of their creation, in which they are served."""

        self.operations: dict[str, Operation] = {}
        self.capacity: dict[str, int] = {}
        """Cores that there are, by the prefix of accelerator types; what has no entry is unlimited."""

        self.quotas: dict[str, int] = {}
        """Cores that may be asked for at once. Requests need quota until they are deleted."""

        self.preempted_nodes_linger = False
        """Preempted nodes stay until their queued resource is deleted, as has been seen."""

        self.stays: set[str] = set()
        """Ids of queued resources whose deletion doesn't come to an end."""

    def needed_cores(self, family: str, but: str) -> int:
        """Sum the cores that all requests hold, in whatever state, but for one of them."""
        sizes = (
            read_accelerator(r.node) for r in self.resources.values() for _ in r.node_ids if r.name != but
        )
        return sum(each.n_cores for each in sizes if each.family.prefix == family)

    def find_excess(self, resource: CloudQueuedResource) -> RefusedError | None:
        """Return the error of a request that is beyond its quota, or None."""
        wanted = read_accelerator(resource.node)
        limit = self.quotas.get(wanted.family.prefix)
        cores = wanted.n_cores * len(resource.node_ids)
        if limit is None or self.needed_cores(wanted.family.prefix, but=resource.name) + cores <= limit:
            return None
        preemptible = "Preemptible" if "guaranteed" not in resource.tier else ""
        quota = f"TPU{preemptible}{wanted.family.quota}PerProjectPerZoneForTPUAPI"
        return quota_exceeded(quota, limit, resource.place.zone)

    def nodes_of(self, resource: CloudQueuedResource) -> list[CloudNode]:
        return [node for node in self.nodes.values() if node.queued_resource == resource.name]

    def start(self, resource: CloudQueuedResource) -> None:
        """Let a request begin that has been accepted."""
        key = (resource.place, resource.id)
        self.resources[key] = resource
        self._later(resource.name, self.timings.creating_s, partial(self._admit, key))
        not_before, not_after = read_window(resource.queueing, self._at)
        if not_after is not None:
            self._timers[f"{resource.name} expires"] = (not_after, partial(self._expire, key, resource))
        if not_before > self._at:
            self._timers[f"{resource.name} starts"] = (not_before, lambda: None)

    def begin(self, verb: str, target: str) -> Operation:
        parent = target.rpartition("/queuedResources/")[0]
        operation = Operation(
            name=f"{parent}/operations/operation-{next(self._numbers)}", verb=verb, target=target
        )
        self.operations[operation.name] = operation
        return operation

    def end(self, key: Key, error: CloudTPUError) -> None:
        """End a request for good: its nodes are removed, and it stays, with the error, until it is deleted."""
        resource = self._find(key)
        if resource is None or resource.state == "DELETING":
            return
        self._enter(resource, "FAILED", error=error)
        self._take_down_all(resource, "failed")
        self._remove(self.nodes_of(resource))
        self._finish(resource.name, "create", error)

    def shut_down(self, key: Key, initiator: str) -> None:
        """Begin to delete the nodes of a request that has some."""
        resource = self._find(key, "PROVISIONING", "ACTIVE")
        if resource is not None:
            self._enter(resource, "SUSPENDING", initiator=initiator)
            self._later(resource.name, self.timings.suspending_s, partial(self._finish_suspending, key))
            self._take_down_all(resource, "suspended")

    def begin_deletion(self, key: Key) -> None:
        """Begin to delete the nodes of a request, and then itself."""
        resource = self.resources[key]
        self._enter(resource, "DELETING")
        self._later(resource.name, self.timings.deleting_s, partial(self._finish_deleting, key))
        self._take_down_all(resource, "deleted")

    def fail_later(self, operation: Operation, error: CloudTPUError) -> None:
        """Let a deletion's operation end with this error, as late as a deletion would."""

        def fail() -> None:
            operation.done, operation.error = True, error

        self._later(operation.name, self.timings.deleting_s, fail)

    def _find(self, key: Key, *states: str) -> CloudQueuedResource | None:
        """Return what is there in one of these states, or in any if none are given; None: nothing is."""
        found = self.resources.get(key)
        return found if found is not None and (not states or found.state in states) else None

    def _resource_of(self, node: CloudNode) -> CloudQueuedResource | None:
        return self.resources.get((node.place, node.queued_resource.rpartition("/")[2]))

    def _enter(
        self,
        resource: CloudQueuedResource,
        state: str,
        *,
        initiator: str = "",
        error: CloudTPUError | None = None,
    ) -> None:
        self._timers.pop(resource.name, None)
        self.resources[resource.place, resource.id] = replace(
            resource,
            state=state,
            initiator=initiator,
            error_code="" if error is None else error.code,
            error_message="" if error is None else error.message,
        )

    def _finish(self, target: str, verb: str, error: CloudTPUError | None = None) -> None:
        """End the operations of this verb on the target that haven't ended, well or with an error."""
        for operation in self.operations.values():
            if (operation.target, operation.verb, operation.done) == (target, verb, False):
                operation.done, operation.error = True, error

    def _admit(self, key: Key) -> None:
        resource = self._find(key, "CREATING")
        if resource is None:
            return
        excess = self.find_excess(resource)
        if excess is not None:
            self.end(key, excess)
            return
        self._finish(resource.name, "create")
        if self.timings.accepted_s:
            self._enter(resource, "ACCEPTED")
            self._later(resource.name, self.timings.accepted_s, partial(self._queue, key))
        else:
            self._queue(key)

    def _queue(self, key: Key) -> None:
        resource = self._find(key, "CREATING", "ACCEPTED")
        if resource is not None:
            self._enter(resource, "WAITING_FOR_RESOURCES")

    @override
    def grant(self) -> None:
        """Begin to provision every request whose time has come and for which there is room, first come first."""
        for resource in [r for r in self.resources.values() if r.state == "WAITING_FOR_RESOURCES"]:
            not_before, not_after = read_window(resource.queueing, resource.create_time or 0)
            if not_before > self._at or (not_after is not None and not_after <= self._at):
                continue
            if not self._has_room(resource):
                continue
            self._enter(resource, "PROVISIONING")
            for index, node_id in enumerate(resource.node_ids):
                node = self.create_node(resource, node_id)
                due_s = self.timings.provisioning_s + index * self.timings.node_skew_s
                self._later(name_of(node), due_s, partial(self.become_ready, (node.place, node.id)))

    def _has_room(self, resource: CloudQueuedResource) -> bool:
        wanted = read_accelerator(resource.node)
        total = self.capacity.get(wanted.family.prefix)
        if total is None:
            return True
        there = (self._machines[name_of(n)] for n in self.nodes.values() if n.state not in ENDED)
        running = sum(m.accelerator.n_cores for m in there if m.accelerator.family is wanted.family)
        return running + wanted.n_cores * len(resource.node_ids) <= total

    def _expire(self, key: Key, asked: CloudQueuedResource) -> None:
        resource = self._find(key, "ACCEPTED", "WAITING_FOR_RESOURCES")
        if resource is not None and resource.create_time == asked.create_time:
            message = (
                f"'{resource.name}' could not be fulfilled before its 'valid until' timing constraint expired"
            )
            self.end(key, RefusedError("DEADLINE_EXCEEDED", message))

    def _finish_suspending(self, key: Key) -> None:
        resource = self._find(key, "SUSPENDING")
        if resource is not None:
            nodes = self.nodes_of(resource)
            self._remove(n for n in nodes if not (self.preempted_nodes_linger and n.state in ENDED))
            self._enter(resource, "SUSPENDED", initiator=resource.initiator)

    def _finish_deleting(self, key: Key) -> None:
        resource = self._find(key, "DELETING")
        if resource is None:
            return
        if resource.id in self.stays:
            self._later(resource.name, self.timings.deleting_s, partial(self._finish_deleting, key))
            return
        self._remove(self.nodes_of(resource))
        del self.resources[key]
        self._finish(resource.name, "delete")
        self._finish(
            resource.name, "create", RefusedError("ABORTED", f"'{resource.name}' was deleted meanwhile")
        )

    def _take_down_all(self, resource: CloudQueuedResource, reason: str) -> None:
        for node in self.nodes_of(resource):
            self._timers.pop(name_of(node), None)
            if node.state not in ENDED:
                self._take_down((node.place, node.id), "DELETING", reason)

    @override
    def on_ready(self, node: CloudNode) -> None:
        """Activate a request all of whose nodes are ready."""
        resource = self._resource_of(node)
        if resource is None or resource.state != "PROVISIONING":
            return
        if all(each.state == "READY" for each in self.nodes_of(resource)):
            self._enter(resource, "ACTIVE")

    @override
    def on_lost(self, node: CloudNode) -> None:
        """Suspend the request of a node that was taken away."""
        resource = self._resource_of(node)
        if resource is not None:
            self.shut_down((resource.place, resource.id), "SERVICE")
