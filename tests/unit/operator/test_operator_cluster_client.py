"""Test the requests that the cluster's client sends, and the errors that it makes of answers."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from kubernetes.aio import client as kubernetes_client
from typing_extensions import override

from fake_cluster.stories import table
from stepkeeper_operator.cluster.client import KubernetesCluster
from stepkeeper_operator.cluster.resources import LEASES, NODES, PODS, QUEUED_RESOURCES, Resource
from stepkeeper_operator.errors import ApiError, ConflictError, InvalidObjectError


class Answer:
    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.status = status
        self._body = body

    async def read(self) -> bytes:
        return json.dumps(self._body).encode()


class Wire(kubernetes_client.ApiClient):
    """The package's client as far as the wire: it keeps the requests and returns prepared answers."""

    def __init__(self) -> None:
        super().__init__(kubernetes_client.Configuration(host="http://api"))
        self.requests: list[tuple[str, str, str, Any]] = []
        self.answers: list[Answer] = []

    def answer(self, status: int, **body: Any) -> None:
        self.answers.append(Answer(status, body))

    @override
    async def call_api(self, method: str, url: str, headers: Any, body: Any, **_: Any) -> Any:  # type: ignore[override]
        self.requests.append((method, url.removeprefix("http://api"), headers["Content-Type"], body))
        return self.answers.pop(0)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    wire = Wire()
    yield wire
    await wire.close()  # type: ignore[no-untyped-call]  # the package's own code has no annotations there


@pytest.fixture
def cluster(wire: Wire) -> KubernetesCluster:
    return KubernetesCluster(wire)


@pytest.mark.parametrize(
    ("resource", "paths"),
    [
        (PODS, ["/api/v1/namespaces/ml/pods", "/api/v1/namespaces/vision/pods"]),
        (NODES, ["/api/v1/nodes"]),
        (LEASES, ["/apis/coordination.k8s.io/v1/leases"]),
    ],
)
async def test_where_some_namespaces_are_watched_each_is_listed(
    wire: Wire, resource: Resource, paths: list[str]
) -> None:
    for path in paths:
        wire.answer(200, metadata={}, items=[{"metadata": {"uid": path}}])
    watching = KubernetesCluster(wire, ("ml", "vision"))
    assert await watching.list_uids(resource, "a=b") == set(paths)
    assert [url.partition("?")[0] for _, url, _, _ in wire.requests] == paths
    wire.answer(200, metadata={}, items=[])
    await watching.list_uids(resource, "a=b", namespace="ml")
    assert len(wire.requests) == len(paths) + 1


async def test_a_namespace_that_is_gone_with_its_role_hides_no_other(wire: Wire) -> None:
    watching = KubernetesCluster(wire, ("gone", "ml"))
    wire.answer(403, reason="Forbidden", message="no")
    wire.answer(200, metadata={}, items=[{"metadata": {"uid": "a"}}])
    assert await watching.list_uids(PODS, "") == {"a"}
    for _ in range(2):
        wire.answer(403, reason="Forbidden", message="no role")
    with pytest.raises(ApiError, match="no role"):
        await watching.list_uids(PODS, "")
    wire.answer(500, reason="InternalError", message="broken")
    with pytest.raises(ApiError, match="broken"):
        await watching.list_uids(PODS, "")


Call = Callable[[KubernetesCluster], Awaitable[Any]]
SLICE = "/apis/stepkeeper.dev/v1alpha1/namespaces/ns/queuedresources/a?fieldManager=stepkeeper"
NODE = "/api/v1/nodes/n?fieldManager=stepkeeper"
FINALIZERS: Call = lambda cluster: cluster.set_finalizers(  # a row names it
    QUEUED_RESOURCES, "ns", "a", ["x/y"], uid="u", resource_version="7"
)
CORDON: Call = lambda cluster: cluster.change_node("n", uid="u", unschedulable=True)
EVICTION = {
    "apiVersion": "policy/v1",
    "kind": "Eviction",
    "metadata": {"name": "p", "namespace": "ns"},
    "deleteOptions": {"preconditions": {"uid": "u"}},
}
EVICT: Call = lambda cluster: cluster.evict_pod("ns", "p", uid="u")


@table(
    "call, method, url, body",
    {
        "finalizers, into the version that was read": (
            FINALIZERS,
            "PATCH",
            SLICE,
            {"metadata": {"uid": "u", "resourceVersion": "7", "finalizers": ["x/y"]}},
        ),
        "cordon": (CORDON, "PATCH", NODE, {"metadata": {"uid": "u"}, "spec": {"unschedulable": True}}),
        "labels and annotations of a node": (
            lambda cluster: cluster.change_node("n", uid="u", labels={"a": "b"}, annotations={"c": None}),
            "PATCH",
            NODE,
            {"metadata": {"uid": "u", "labels": {"a": "b"}, "annotations": {"c": None}}},
        ),
        "deletion": (
            lambda cluster: cluster.delete(NODES, None, "n", uid="u"),
            "DELETE",
            "/api/v1/nodes/n",
            {"preconditions": {"uid": "u"}},
        ),
        "eviction": (EVICT, "POST", "/api/v1/namespaces/ns/pods/p/eviction", EVICTION),
    },
)
async def test_a_write_names_the_uid_of_its_object(
    wire: Wire, cluster: KubernetesCluster, call: Call, method: str, url: str, body: dict[str, Any]
) -> None:
    wire.answer(200, metadata={"name": "a"})
    await call(cluster)
    ((sent_method, sent_url, content_type, sent),) = wire.requests
    assert (sent_method, sent_url) == (method, url)
    assert sent.items() >= body.items()
    assert method != "PATCH" or content_type == "application/merge-patch+json"


@table(
    "call, status, message, error",
    {
        "changed meanwhile": (FINALIZERS, 409, "modified", ConflictError),
        "another node": (CORDON, 422, "uid: field is immutable", ConflictError),
        "a webhook forbids it": (CORDON, 403, "admission webhook", InvalidObjectError),
        "a budget forbids it now": (EVICT, 429, "budget", ApiError),
        "another pod has its name": (EVICT, 409, "another pod", ConflictError),
        "two budgets select it": (EVICT, 500, "two budgets", ApiError),
        "finalizers of what is gone": (FINALIZERS, 404, "gone", None),
        "a pod that is gone": (EVICT, 404, "gone", None),
    },
)
async def test_a_write_is_refused(
    wire: Wire,
    cluster: KubernetesCluster,
    call: Call,
    status: int,
    message: str,
    error: type[ApiError] | None,
) -> None:
    reason = {409: "Conflict", 422: "Invalid", 404: "NotFound"}.get(status, "Forbidden")
    wire.answer(status, reason=reason, message=message)
    if error is None:
        assert await call(cluster) is None
        return
    with pytest.raises(ApiError, match=message) as caught:
        await call(cluster)
    assert type(caught.value) is error
    assert caught.value.status == status


async def test_lists_are_read_page_by_page(wire: Wire, cluster: KubernetesCluster) -> None:
    for _ in range(2):
        wire.answer(200, metadata={"continue": "more"}, items=[{"metadata": {"uid": "a"}}])
        wire.answer(200, metadata={}, items=[{"metadata": {"uid": "b"}}])
    assert await cluster.list_uids(QUEUED_RESOURCES, "") == {"a", "b"}
    assert [pod["metadata"]["uid"] for pod in await cluster.list_pods_on("n")] == ["a", "b"]
    wire.answer(200, metadata={}, items=[{"note": "killed"}])
    assert await cluster.list_events("a", reason="Killing") == ({"note": "killed"},)
    slices = "/apis/stepkeeper.dev/v1alpha1/queuedresources?limit=500"
    pods = "/api/v1/pods?limit=500&fieldSelector=spec.nodeName%3Dn"
    urls = [url for _, url, _, _ in wire.requests]
    events = "/apis/events.k8s.io/v1/namespaces/a/events?limit=500&fieldSelector=reason%3DKilling"
    assert urls == [slices, f"{slices}&continue=more", pods, f"{pods}&continue=more", events]


async def test_an_object_is_read_or_is_not_there(wire: Wire, cluster: KubernetesCluster) -> None:
    wire.answer(200, data={"key": "eA=="})
    wire.answer(404, reason="NotFound")
    assert await cluster.get(NODES, None, "s") == {"data": {"key": "eA=="}}
    assert await cluster.get(NODES, None, "s") is None
