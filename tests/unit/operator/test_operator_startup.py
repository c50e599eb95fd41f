"""An operator that can't work yet says why, and goes on by itself once it can."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator import readiness
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.startup import Operator

SETTINGS = OperatorSettings(namespace="ns", identity="a", tls_secret_name="tls", lease_duration_s=3)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    monkeypatch.setattr(readiness, "_CHECK_S", 0.01)
    return FakeCluster(lambda: 0.0)


@pytest.fixture
async def starting(cluster: FakeCluster) -> AsyncIterator[Operator]:
    operator = Operator(SETTINGS, cluster)
    yield operator
    await operator._readiness.give_up()


async def health(operator: Operator) -> dict[str, object]:
    (handler,) = (
        route.handler
        for route in operator._make_health_app().router.routes()
        if route.method == "GET" and route.resource is not None and route.resource.canonical == "/healthz"
    )
    answer = await handler(make_mocked_request("GET", "/healthz"))
    assert isinstance(answer, web.Response)
    assert answer.status == 200, "the kubelet must not kill what only waits"
    return dict(json.loads(answer.text or ""))


async def wait_until(found: Callable[[], bool]) -> None:
    for _ in range(2000):
        if found():
            return
        await asyncio.sleep(0.01)
    pytest.fail("nothing happened for 20 s")


async def wait_until_told(operator: Operator, text: str) -> None:
    await wait_until(lambda: text in operator._readiness.waits_for)
    assert text in str((await health(operator))["waits_for"])


async def test_a_secret_of_somebody_else_keeps_the_operator_waiting_until_it_is_gone(
    cluster: FakeCluster, starting: Operator
) -> None:
    cluster.put("secrets", {"metadata": {"name": "tls", "namespace": "ns"}, "data": {"tls.crt": "aGVycw=="}})
    ready = asyncio.create_task(starting._readiness.get_ready())
    await wait_until_told(starting, "Secret ns/tls was not made by this operator")
    assert not ready.done()
    cluster.remove("secrets", "ns", "tls")
    await ready
    assert (await health(starting))["waits_for"] == ""
    assert starting._certificate.ca_pem.startswith("-----BEGIN CERTIFICATE")


async def test_the_lease_is_kept_while_the_operator_waits_for_its_secret(
    cluster: FakeCluster, starting: Operator
) -> None:
    cluster.put("secrets", {"metadata": {"name": "tls", "namespace": "ns"}})
    ready = asyncio.create_task(starting._readiness.get_ready())
    await wait_until_told(starting, "Secret ns/tls")

    def version() -> str:
        return str(cluster.objects["leases", "ns", "stepkeeper-operator"]["metadata"]["resourceVersion"])

    first = version()
    await wait_until(lambda: version() != first)
    assert starting._lease.held
    ready.cancel()
    await asyncio.gather(ready, return_exceptions=True)
