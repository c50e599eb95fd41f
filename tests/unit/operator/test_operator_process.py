"""Test the process: settings, logs, errors, its commands, and what it waits for at its start."""

import asyncio
import io
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from fake_cluster.cluster import FakeCluster
from stepkeeper_operator import readiness
from stepkeeper_operator.__main__ import KeyValueFormatter, main
from stepkeeper_operator.cloud_tpu.naming import FINALIZER
from stepkeeper_operator.errors import ApiError, api_error
from stepkeeper_operator.queued_resources.uninstall import OBSTACLE, check_uninstall
from stepkeeper_operator.settings import OperatorSettings
from stepkeeper_operator.startup import Operator


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPKEEPER_OPERATOR_NAMESPACE", "ops")
    monkeypatch.setenv("STEPKEEPER_OPERATOR_KUBECONFIG", "/k")
    monkeypatch.setenv("STEPKEEPER_OPERATOR_WATCH_NAMESPACES", '["ml","vision"]')
    settings = OperatorSettings()
    assert settings.watch_namespaces == ("ml", "vision")
    assert (settings.namespace, settings.kubeconfig) == ("ops", Path("/k"))
    assert settings.report_url("ns", "lm").startswith("https://stepkeeper-operator.ops.svc:8443/v1/")
    settings = OperatorSettings(endpoint_url="https://10.0.0.1:9443/")
    assert settings.report_url("ns", "lm") == "https://10.0.0.1:9443/v1/namespaces/ns/jobs/lm/report"
    assert "10.0.0.1" in settings.certificate_names()


def test_a_log_line_is_pairs_that_can_be_searched_for() -> None:
    told: dict[str, Any] = {"msg": "wrote %s", "args": ("status",), "levelname": "INFO"}
    told |= {"job": "a/b", "why": "x y"}
    try:
        raise ValueError("broken")
    except ValueError:
        bug = {"created": 0.25, "msecs": 250, "exc_info": sys.exc_info()}
    line, *traceback = KeyValueFormatter().format(logging.makeLogRecord(told | bug)).splitlines()
    assert line == 'time=1970-01-01T00:00:00.250Z level=info event="wrote status" job=a/b why="x y"'
    assert traceback[-1] == "ValueError: broken"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"lease_duration_s": 0}, "lease_duration_s"),
        ({"cloud_tpu_insecure": True}, "STEPKEEPER_OPERATOR_CLOUD_TPU_ENDPOINT"),
        ({"report_interval_s": 90}, "STEPKEEPER_OPERATOR_SILENCE_S"),
    ],
)
def test_a_setting_that_can_not_be_is_refused(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        OperatorSettings(**given)


def test_an_answer_of_the_api_server_that_is_no_json_is_an_error_too() -> None:
    assert "Bad Gateway" in str(api_error(502, b"<html>Bad Gateway", "GET", "/x"))


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    monkeypatch.setattr(readiness, "_CHECK_S", 0.01)
    return FakeCluster(lambda: 0.0)


@pytest.fixture
async def starting(cluster: FakeCluster) -> AsyncIterator[Operator]:
    settings = OperatorSettings(namespace="ns", identity="a", tls_secret_name="tls", lease_duration_s=3)
    operator = Operator(settings, cluster)
    yield operator
    await operator._readiness.give_up()


async def health(operator: Operator) -> dict[str, object]:
    request = make_mocked_request("GET", "/healthz")
    answer = await (await operator._make_health_app().router.resolve(request)).handler(request)
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


def add(
    cluster: FakeCluster, name: str, *, policy: str = "Delete", finalizer: bool = False, **status: str
) -> None:
    meta: dict[str, Any] = {"namespace": "ml", "name": name}
    if finalizer:
        meta["finalizers"] = [FINALIZER]
    cluster.put("queuedresources", {"metadata": meta, "spec": {"deletionPolicy": policy}, "status": status})


async def check(cluster: FakeCluster) -> tuple[int, str]:
    output = io.StringIO()
    return await check_uninstall(cluster, output), output.getvalue()


def check_remedies(text: str, name: str) -> None:
    remedies = (f"kubectl delete qr --namespace ml {name}", "spec.deletionPolicy: Retain", "--no-hooks")
    for remedy in remedies:
        assert remedy in text


async def test_what_is_to_stay_in_the_cloud_could_not_be_deleted_without_the_operator(
    cluster: FakeCluster,
) -> None:
    add(cluster, "kept", policy="Retain", finalizer=True, state="Active")
    add(cluster, "v5e", finalizer=True)
    cluster.mark_deleted("queuedresources", "ml", "v5e", grace_s=0)
    status, text = await check(cluster)
    assert status == OBSTACLE
    assert "ml/kept: no known cloud resource (Active, deletionPolicy Retain)" in text
    assert "ml/v5e: no known cloud resource (being deleted, deletionPolicy Delete)" in text
    check_remedies(text, "kept")


async def test_a_resource_that_would_be_left_is_named_with_what_to_do(cluster: FakeCluster) -> None:
    add(cluster, "kept", policy="Retain")
    assert await check(cluster) == (0, "")
    name = "projects/p/locations/us-west4-a/queuedResources/ml-v5e"
    add(cluster, "v5e", state="Active", cloudName=name)
    status, text = await check(cluster)
    assert status == OBSTACLE
    assert text.startswith("1 QueuedResource needs the operator")
    assert f"ml/v5e: {name} (Active, deletionPolicy Delete)" in text
    check_remedies(text, "v5e")
    assert "kept" not in text


def test_a_command_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["uninstall"]) == os.EX_USAGE
    assert "[check-uninstall]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "ends_with"), [(404, 0), (0, os.EX_TEMPFAIL), (403, os.EX_TEMPFAIL), (500, os.EX_TEMPFAIL)]
)
async def test_what_can_not_be_listed_is_no_obstacle_only_if_there_is_no_crd(
    cluster: FakeCluster, status: int, ends_with: int
) -> None:
    cluster.refusals["list", "queuedresources"] = ApiError(status, "no answer")
    ended, text = await check(cluster)
    assert ended == ends_with
    assert ("no answer" in text) is (ends_with != 0)


async def test_the_message_stays_short(cluster: FakeCluster) -> None:
    for number in range(200):
        add(cluster, f"v5e-{number}")
    text = (await check(cluster))[1]
    assert "and 180 more" in text
    assert len(text.splitlines()) < 30
