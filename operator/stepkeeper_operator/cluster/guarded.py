"""Look at the Lease before each write: whoever has lost it sends none."""

from collections.abc import Callable, Mapping, Sequence

from typing_extensions import override

from stepkeeper_operator.cluster.protocol import Cluster
from stepkeeper_operator.cluster.resources import Resource
from stepkeeper_operator.errors import LeaseLostError
from stepkeeper_operator.facts.raw import RawObject

__all__ = ["GuardedCluster"]


class GuardedCluster(Cluster):
    """Pass requests on to another cluster, and writes only while this operator acts.

    Between two writes of one reconcile seconds can pass, and another operator may have taken over meanwhile. Each write
    raises LeaseLostError then.
    """

    def __init__(self, cluster: Cluster, *, acting: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._acting = acting

    def _check(self) -> None:
        if not self._acting():
            raise LeaseLostError("the lease is over: another operator may act, and nothing more is written")

    @override
    async def get(self, resource: Resource, namespace: str | None, name: str) -> RawObject | None:
        return await self._cluster.get(resource, namespace, name)

    @override
    async def list_uids(
        self, resource: Resource, label_selector: str, *, namespace: str | None = None
    ) -> frozenset[str]:
        return await self._cluster.list_uids(resource, label_selector, namespace=namespace)

    @override
    async def list_all(self, resource: Resource, label_selector: str = "") -> tuple[RawObject, ...]:
        return await self._cluster.list_all(resource, label_selector)

    @override
    async def list_pods_on(self, node_name: str) -> tuple[RawObject, ...]:
        return await self._cluster.list_pods_on(node_name)

    @override
    async def create(self, resource: Resource, namespace: str | None, body: RawObject) -> RawObject:
        self._check()
        return await self._cluster.create(resource, namespace, body)

    @override
    async def replace(self, resource: Resource, namespace: str | None, body: RawObject) -> RawObject:
        self._check()
        return await self._cluster.replace(resource, namespace, body)

    @override
    async def apply(
        self, resource: Resource, namespace: str, body: RawObject, *, subresource: str | None = None
    ) -> RawObject:
        self._check()
        return await self._cluster.apply(resource, namespace, body, subresource=subresource)

    @override
    async def patch_pod_status(self, namespace: str, name: str, body: RawObject) -> None:
        self._check()
        await self._cluster.patch_pod_status(namespace, name, body)

    @override
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
        self._check()
        return await self._cluster.set_finalizers(
            resource, namespace, name, finalizers, uid=uid, resource_version=resource_version
        )

    @override
    async def change_node(
        self,
        node_name: str,
        *,
        uid: str,
        unschedulable: bool | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str | None] | None = None,
    ) -> RawObject | None:
        self._check()
        return await self._cluster.change_node(
            node_name, uid=uid, unschedulable=unschedulable, labels=labels, annotations=annotations
        )

    @override
    async def evict_pod(self, namespace: str, name: str, *, uid: str) -> None:
        self._check()
        await self._cluster.evict_pod(namespace, name, uid=uid)

    @override
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
        self._check()
        await self._cluster.delete(resource, namespace, name, uid=uid, foreground=foreground, at_once=at_once)
