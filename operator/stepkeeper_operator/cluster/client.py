"""Send requests to the API server with the kubernetes package, without its models: objects stay JSON."""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config

from stepkeeper_operator.cluster.resources import EVENTS, NODES, PODS, Resource
from stepkeeper_operator.errors import ApiError, ConflictError, InvalidObjectError, api_error
from stepkeeper_operator.facts.raw import RawObject
from stepkeeper_operator.labels import FIELD_OWNER

__all__ = ["KubernetesCluster", "connect"]

_TIMEOUT_S = 15
_OWNER = {"fieldManager": FIELD_OWNER}
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"


class KubernetesCluster:
    """Implement `Cluster` with the asyncio client of the kubernetes package."""

    def __init__(self, client: kubernetes_client.ApiClient, watched: Sequence[str] = ()) -> None:
        """Make a client that lists the `watched` namespaces; empty: all."""
        self._client = client
        self._watched = watched

    async def close(self) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]  # the package's own code has no annotations there

    async def get(self, resource: Resource, namespace: str | None, name: str) -> RawObject | None:
        return await self._ask("GET", resource.path(namespace, name), none_for_404=True)

    async def list_uids(
        self, resource: Resource, label_selector: str, *, namespace: str | None = None
    ) -> frozenset[str]:
        query = {"labelSelector": label_selector} if label_selector else {}
        items = await self._list(resource, query, namespace=namespace, accept=_METADATA_ONLY)
        return frozenset(item["metadata"]["uid"] for item in items)

    async def list_all(self, resource: Resource, label_selector: str = "") -> tuple[RawObject, ...]:
        query = {"labelSelector": label_selector} if label_selector else {}
        return tuple(await self._list(resource, query))

    async def list_pods_on(self, node_name: str) -> tuple[RawObject, ...]:
        return tuple(await self._list(PODS, {"fieldSelector": f"spec.nodeName={node_name}"}))

    async def list_events(self, namespace: str, *, reason: str) -> tuple[RawObject, ...]:
        return tuple(await self._list(EVENTS, {"fieldSelector": f"reason={reason}"}, namespace=namespace))

    async def create(self, resource: Resource, namespace: str | None, body: RawObject) -> RawObject:
        return await self._answer("POST", resource.path(namespace), body=body, query=_OWNER)

    async def replace(self, resource: Resource, namespace: str | None, body: RawObject) -> RawObject:
        path = resource.path(namespace, body["metadata"]["name"])
        return await self._answer("PUT", path, body=body, query=_OWNER)

    async def apply(
        self, resource: Resource, namespace: str, body: RawObject, *, subresource: str | None = None
    ) -> RawObject:
        path = resource.path(namespace, body["metadata"]["name"], subresource)
        query = _OWNER | {"force": "true"}  # take over fields of other owners instead of failing
        return await self._answer("PATCH", path, body=body, query=query, content_type=_APPLY)

    async def patch_pod_status(self, namespace: str, name: str, body: RawObject) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/status"
        await self._answer("PATCH", path, body=body, query=_OWNER, content_type=_STRATEGIC)

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
        meta = {"uid": uid, "resourceVersion": resource_version, "finalizers": list(finalizers)}
        return await self._merge(resource.path(namespace, name), {"metadata": meta})

    async def change_node(
        self,
        node_name: str,
        *,
        uid: str,
        unschedulable: bool | None = None,
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str | None] | None = None,
    ) -> RawObject | None:
        meta: dict[str, Any] = {"uid": uid}
        meta |= {} if labels is None else {"labels": dict(labels)}
        meta |= {} if annotations is None else {"annotations": dict(annotations)}
        body: dict[str, Any] = {"metadata": meta}
        body |= {} if unschedulable is None else {"spec": {"unschedulable": unschedulable}}
        try:
            return await self._merge(NODES.path(None, node_name), body)
        except InvalidObjectError as error:
            # Only the uid of this body can be invalid: it is immutable, and a patch of another node would change it.
            if error.status == HTTPStatus.UNPROCESSABLE_ENTITY:
                raise ConflictError(error.status, str(error)) from error
            raise

    async def evict_pod(self, namespace: str, name: str, *, uid: str) -> None:
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        }
        path = PODS.path(namespace, name, "eviction")
        await self._ask("POST", path, body=body, none_for_404=True)

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
        options: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Foreground" if foreground else "Background",
        }
        if at_once:
            options["gracePeriodSeconds"] = 0
        await self._ask("DELETE", resource.path(namespace, name), body=options, none_for_404=True)

    async def _list(
        self,
        resource: Resource,
        query: Mapping[str, str],
        *,
        namespace: str | None = None,
        accept: str = "application/json",
    ) -> list[RawObject]:
        items: list[RawObject] = []
        if namespace is None and self._watched and not resource.cluster_wide:
            return await self._list_watched(resource, query, accept=accept)
        query = {"limit": "500", **query}
        while True:
            page = await self._answer("GET", resource.path(namespace), query=query, accept=accept)
            items += page.get("items") or ()
            token = page["metadata"].get("continue")
            if not token:
                return items
            query |= {"continue": token}

    async def _list_watched(
        self, resource: Resource, query: Mapping[str, str], *, accept: str
    ) -> list[RawObject]:
        """List the watched namespaces, except for those whose Role is gone, as with the namespace itself."""
        items, refusals = list[RawObject](), list[ApiError]()
        for namespace in self._watched:
            try:
                items += await self._list(resource, query, namespace=namespace, accept=accept)
            except ApiError as error:
                if error.status != HTTPStatus.FORBIDDEN:
                    raise
                refusals.append(error)
        if len(refusals) == len(self._watched):
            raise refusals[0]
        return items

    async def _merge(self, path: str, body: RawObject) -> RawObject | None:
        return await self._ask("PATCH", path, body=body, query=_OWNER, content_type=_MERGE, none_for_404=True)

    async def _answer(self, method: str, path: str, **request: Any) -> RawObject:
        """Send a request that has an answer, and return it. Raises ApiError, also for a missing object."""
        answer = await self._ask(method, path, **request)
        assert answer is not None  # only none_for_404 gives None
        return answer

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        body: RawObject | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        none_for_404: bool = False,
    ) -> RawObject | None:
        verb, url, headers, _, _ = await self._client.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": accept, "Content-Type": content_type},
            auth_settings=["BearerToken"],
        )
        try:
            response = await self._client.call_api(verb, url, headers, body, _request_timeout=_TIMEOUT_S)
            data = await response.read()  # type: ignore[no-untyped-call]  # the package's own code has no annotations there
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(0, f"{method} {path}: no answer: {error!r}") from error
        if response.status == 404 and none_for_404:
            return None
        if response.status >= 400:
            raise api_error(response.status, data, method, path)
        try:
            answer: RawObject = json.loads(data)
        except ValueError as error:
            raise ApiError(0, f"{method} {path}: the answer is not JSON: {error}") from error
        return answer


async def connect(kubeconfig: Path | None, watched: Sequence[str]) -> KubernetesCluster:
    """Connect to the cluster that `kubeconfig` names, or to the one that this pod runs in."""
    configuration = kubernetes_client.Configuration()
    if kubeconfig is None:
        kubernetes_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]  # the package's own code has no annotations there
    else:
        await kubernetes_config.load_kube_config(  # type: ignore[no-untyped-call]  # the package's own code has no annotations there
            config_file=str(kubeconfig), client_configuration=configuration
        )
    return KubernetesCluster(kubernetes_client.ApiClient(configuration), watched)
