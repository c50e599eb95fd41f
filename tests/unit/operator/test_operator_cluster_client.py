"""Test the requests that the cluster's client sends, and the errors that it makes of answers."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kubernetes.aio import client as kubernetes_client
from typing_extensions import override

from stepkeeper_operator.cluster import NODES, QUEUED_RESOURCES, SECRETS, KubernetesCluster
from stepkeeper_operator.errors import ApiError, ConflictError, InvalidObjectError


class Answer:
    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.status = status
        self._body = body

    async def read(self) -> bytes:
        return json.dumps(self._body).encode()


class Wire(kubernetes_client.ApiClient):
    """The package's client as far as the wire: it keeps the requests and gives the answers that it is told."""

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


async def test_finalizers_are_merged_into_the_version_that_was_read(
    wire: Wire, cluster: KubernetesCluster
) -> None:
    wire.answer(200, metadata={"name": "a"})
    args = {"uid": "u", "resource_version": "7"}
    assert await cluster.set_finalizers(QUEUED_RESOURCES, "ns", "a", ["x/y"], **args) == {
        "metadata": {"name": "a"}
    }
    ((method, url, content_type, body),) = wire.requests
    assert (method, content_type) == ("PATCH", "application/merge-patch+json")
    assert url == "/apis/stepkeeper.dev/v1alpha1/namespaces/ns/queuedresources/a?fieldManager=stepkeeper"
    assert body == {"metadata": {"uid": "u", "resourceVersion": "7", "finalizers": ["x/y"]}}


async def test_finalizers_of_a_changed_object_are_a_conflict(wire: Wire, cluster: KubernetesCluster) -> None:
    wire.answer(409, reason="Conflict", message="the object has been modified")
    with pytest.raises(ConflictError, match="modified"):
        await cluster.set_finalizers(QUEUED_RESOURCES, "ns", "a", [], uid="u", resource_version="7")


async def test_finalizers_of_an_object_that_is_gone_are_no_error(
    wire: Wire, cluster: KubernetesCluster
) -> None:
    wire.answer(404, reason="NotFound")
    answer = await cluster.set_finalizers(QUEUED_RESOURCES, "ns", "a", [], uid="u", resource_version="7")
    assert answer is None


async def test_a_node_is_cordoned_by_its_uid(wire: Wire, cluster: KubernetesCluster) -> None:
    wire.answer(200, metadata={"name": "n"})
    await cluster.change_node("n", uid="u", unschedulable=True)
    ((method, url, content_type, body),) = wire.requests
    assert (method, url) == ("PATCH", "/api/v1/nodes/n?fieldManager=stepkeeper")
    assert content_type == "application/merge-patch+json"
    assert body == {"metadata": {"uid": "u"}, "spec": {"unschedulable": True}}


async def test_a_node_is_labelled_and_annotated_by_its_uid(wire: Wire, cluster: KubernetesCluster) -> None:
    wire.answer(200, metadata={"name": "n"})
    await cluster.change_node("n", uid="u", labels={"a": "b"}, annotations={"c": None})
    ((_, _, _, body),) = wire.requests
    assert body == {"metadata": {"uid": "u", "labels": {"a": "b"}, "annotations": {"c": None}}}


async def test_a_node_of_another_uid_is_a_conflict(wire: Wire, cluster: KubernetesCluster) -> None:
    wire.answer(422, reason="Invalid", message='Node "n" is invalid: metadata.uid: field is immutable')
    with pytest.raises(ConflictError, match="immutable"):
        await cluster.change_node("n", uid="u", unschedulable=True)


async def test_a_webhook_that_forbids_to_cordon_is_no_conflict(
    wire: Wire, cluster: KubernetesCluster
) -> None:
    wire.answer(403, reason="Forbidden", message="admission webhook said no")
    with pytest.raises(InvalidObjectError):
        await cluster.change_node("n", uid="u", unschedulable=True)


async def test_a_node_is_deleted_by_its_uid(wire: Wire, cluster: KubernetesCluster) -> None:
    wire.answer(200)
    await cluster.delete(NODES, None, "n", uid="u")
    ((method, url, _, body),) = wire.requests
    assert (method, url) == ("DELETE", "/api/v1/nodes/n")
    assert body["preconditions"] == {"uid": "u"}


async def test_a_pod_is_evicted_by_its_uid(wire: Wire, cluster: KubernetesCluster) -> None:
    wire.answer(201)
    await cluster.evict_pod("ns", "p", uid="u")
    ((method, url, _, body),) = wire.requests
    assert (method, url) == ("POST", "/api/v1/namespaces/ns/pods/p/eviction")
    assert (body["apiVersion"], body["kind"]) == ("policy/v1", "Eviction")
    assert body["metadata"] == {"name": "p", "namespace": "ns"}
    assert body["deleteOptions"] == {"preconditions": {"uid": "u"}}


async def test_a_pod_that_is_gone_is_evicted_already(wire: Wire, cluster: KubernetesCluster) -> None:
    wire.answer(404, reason="NotFound")
    await cluster.evict_pod("ns", "p", uid="u")
    assert len(wire.requests) == 1


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        pytest.param(429, "TooManyRequests", ApiError, id="a budget forbids it now"),
        pytest.param(409, "Conflict", ConflictError, id="another pod has its name"),
        pytest.param(500, "InternalError", ApiError, id="two budgets select it"),
    ],
)
async def test_an_eviction_is_refused(
    wire: Wire, cluster: KubernetesCluster, status: int, reason: str, kind: type[ApiError]
) -> None:
    wire.answer(status, reason=reason, message="the pod's disruption budget")
    with pytest.raises(ApiError, match=r"pods/p/eviction.*budget") as caught:
        await cluster.evict_pod("ns", "p", uid="u")
    assert type(caught.value) is kind
    assert caught.value.status == status


async def test_all_pods_of_a_node_are_listed_page_by_page(wire: Wire, cluster: KubernetesCluster) -> None:
    wire.answer(200, metadata={"continue": "more"}, items=[{"metadata": {"name": "a"}}])
    wire.answer(200, metadata={}, items=[{"metadata": {"name": "b"}}])
    pods = await cluster.list_pods_on("n")
    assert [pod["metadata"]["name"] for pod in pods] == ["a", "b"]
    urls = [url for _, url, _, _ in wire.requests]
    assert urls[0] == "/api/v1/pods?limit=500&fieldSelector=spec.nodeName%3Dn"
    assert urls[1] == urls[0] + "&continue=more"


async def test_uids_are_listed_page_by_page(wire: Wire, cluster: KubernetesCluster) -> None:
    wire.answer(200, metadata={"continue": "more"}, items=[{"metadata": {"uid": "a"}}])
    wire.answer(200, metadata={}, items=[{"metadata": {"uid": "b"}}])
    assert await cluster.list_uids(QUEUED_RESOURCES, "") == {"a", "b"}
    assert [url for _, url, _, _ in wire.requests] == [
        "/apis/stepkeeper.dev/v1alpha1/queuedresources?limit=500",
        "/apis/stepkeeper.dev/v1alpha1/queuedresources?limit=500&continue=more",
    ]


async def test_a_secret_is_read_or_is_not_there(wire: Wire, cluster: KubernetesCluster) -> None:
    wire.answer(200, data={"key": "eA=="})
    wire.answer(404, reason="NotFound")
    assert await cluster.get(SECRETS, "ns", "s") == {"data": {"key": "eA=="}}
    assert await cluster.get(SECRETS, "ns", "s") is None
    assert wire.requests[0][:2] == ("GET", "/api/v1/namespaces/ns/secrets/s")
