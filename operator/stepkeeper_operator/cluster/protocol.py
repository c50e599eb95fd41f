"""Define the requests that the operator sends to an API server, and check the Lease before each write."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from stepkeeper_operator.cluster.resources import Resource
from stepkeeper_operator.errors import LeaseLostError
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["Cluster", "guard_writes"]

T = TypeVar("T")


class Cluster(Protocol):
    """All requests to an API server. Each raises ApiError or a named subclass. Reads begin with get or list.

    If only some namespaces are watched, a list of all namespaces has those, except for nodes and Leases.
    """

    async def get(self, resource: Resource, namespace: str | None, name: str) -> RawObject | None:
        """Read the object. Return None if there is none."""

    async def list_uids(
        self, resource: Resource, label_selector: str, *, namespace: str | None = None
    ) -> frozenset[str]:
        """List the uids of all objects that match the selector, in one namespace or in all."""

    async def list_all(self, resource: Resource, label_selector: str = "") -> tuple[RawObject, ...]:
        """List all objects of the kind that match the selector, in all namespaces."""

    async def list_pods_on(self, node_name: str) -> tuple[RawObject, ...]:
        """List all pods that are bound to the node, regardless of their owner."""

    async def list_events(self, namespace: str, *, reason: str) -> tuple[RawObject, ...]:
        """List the events with that reason in the namespace: those of the last hour."""

    async def create(self, resource: Resource, namespace: str | None, body: RawObject) -> RawObject:
        """Create the object. Raises AlreadyExistsError."""

    async def replace(self, resource: Resource, namespace: str | None, body: RawObject) -> RawObject:
        """Replace the object with `body`. Raises ConflictError if its resourceVersion is out of date."""

    async def apply(
        self, resource: Resource, namespace: str, body: RawObject, *, subresource: str | None = None
    ) -> RawObject:
        """Apply `body` server-side as the owner of its fields. Raises ConflictError for another uid or version."""

    async def patch_pod_status(self, namespace: str, name: str, body: RawObject) -> None:
        """Merge `body` into the status of a pod. Conditions are merged by type."""

    async def set_finalizers(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        finalizers: Sequence[str],
        *,
        uid: str,
        resource_version: str,
    ) -> RawObject | None:
        """Replace the finalizers. Return None if the object is gone. Raises ConflictError if it has changed."""

    async def change_node(
        self,
        node_name: str,
        *,
        uid: str,
        unschedulable: bool | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str | None] | None = None,
    ) -> RawObject | None:
        """Cordon, uncordon, label or annotate the node; None removes an annotation. Return None if the node is gone.

        Raises ConflictError if another node has its name.
        """

    async def evict_pod(self, namespace: str, name: str, *, uid: str) -> None:
        """Evict the pod with that uid, if it still exists.

        Raises ConflictError if another pod has its name, ApiError 429 while a PodDisruptionBudget forbids it.
        """

    async def delete(
        self,
        resource: Resource,
        namespace: str | None,
        name: str,
        *,
        uid: str,
        foreground: bool = False,
        at_once: bool = False,
    ) -> None:
        """Delete the object with that uid. Raises ConflictError if another object has its name.

        With `at_once` a pod's object is deleted without waiting for its kubelet.
        """


def guard_writes(api: T, *, acting: Callable[[], bool]) -> T:
    """Return the API of the cluster or the cloud. It raises LeaseLostError before a write if `acting` returns False.

    Seconds can pass between two writes of one reconcile, and another operator may take over in that time.
    """
    return cast(T, _Guarded(api, acting))


class _Guarded:
    def __init__(self, api: object, acting: Callable[[], bool]) -> None:
        self._api = api
        self._acting = acting

    def __getattr__(self, name: str) -> Any:
        request = getattr(self._api, name)
        if name.startswith(("get", "list")):
            return request

        async def send(*place: Any, **options: Any) -> Any:
            if not self._acting():
                text = "the lease has expired: another operator may act, and this one writes nothing more"
                raise LeaseLostError(text)
            return await request(*place, **options)

        return send
