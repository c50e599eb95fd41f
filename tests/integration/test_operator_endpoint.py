"""Test the endpoint over real sockets: the pods that may report, and the refusals of all others."""

import asyncio
import json
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from fake_cluster.kubelets import training_report
from fake_cluster.world import World
from stepkeeper.contract import Directive, Report, ReportPhase, token_audience
from stepkeeper_operator.api.v1alpha1.trainingjob_status import SaveRequest
from stepkeeper_operator.cache.keys import ObjectKey, job_key
from stepkeeper_operator.endpoint.app import ReportEndpoint
from stepkeeper_operator.endpoint.authentication import ReportAuthenticator
from stepkeeper_operator.endpoint.certificates import make_tls
from stepkeeper_operator.endpoint.serving import Servers, load_certificate, server_tls
from stepkeeper_operator.endpoint.tokens import TokenPod
from stepkeeper_operator.labels import JOB_UID_LABEL
from stepkeeper_operator.metrics import Metrics

PATH = "/v1/namespaces/default/jobs/lm/report"
TRAINER_PATH = "/v1/namespaces/default/jobs/lm/trainer-status"
KUBEFLOW = Path(__file__).parents[1] / "data/kubeflow/trainer-status.json"
"""The posts of transformers' KubeflowCallback (integrations/test_kubeflow_callback.py records them)."""


class Tokens:
    """Verify tokens `<pod name>@<audience>` in place of an API server."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.gone: TokenPod | None = None
        """The pod of all tokens, if it is set."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.asked = asyncio.Event()

    def claims(self, token: str, audience: str) -> bool:
        return token.partition("@")[2] == audience

    async def verify(self, token: str, audience: str) -> TokenPod | None:
        self.asked.set()
        await self.may_answer.wait()
        if self.gone is not None:
            return self.gone
        name, _, said = token.partition("@")
        pod = self._world.cluster.objects.get(("pods", "default", name))
        if said != audience or pod is None:
            return None
        return TokenPod(namespace="default", name=name, uid=pod["metadata"]["uid"])


@dataclass
class Desk:
    """Post to the endpoint of a world with one running job."""

    world: World
    app: web.Application
    client: TestClient[web.Request, web.Application]
    tokens: Tokens
    enqueued: list[ObjectKey] = field(default_factory=list)
    acting: bool = True

    def token(self, pod: str | None = None, uid: str | None = None) -> str:
        name = pod or self.world.pods[0]["metadata"]["name"]
        return f"{name}@{token_audience(uid or self.world.job.metadata.uid)}"

    async def post(self, body: bytes, *, token: str | None, path: str = PATH) -> tuple[int, bytes]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with self.client.post(path, data=body, headers=headers) as answer:
            return answer.status, await answer.read()


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    world = World()
    await world.run_until_settled(rounds=4)
    made: list[Desk] = []

    def enqueue(key: ObjectKey) -> None:
        made[0].enqueued.append(key)

    tokens = Tokens(world)
    endpoint = ReportEndpoint(
        authenticator=ReportAuthenticator(world.cache, tokens),
        reports=world.reports,
        enqueue=enqueue,
        acting=lambda: made[0].acting,
        metrics=Metrics(),
        clock=lambda: world.now,
    )
    app = endpoint.make_app()
    async with TestClient(TestServer(app)) as client:
        made.append(Desk(world, app, client, tokens))
        yield made[0]


REPORT = Report(phase=ReportPhase.TRAINING, step=42).to_json()


@pytest.mark.smoke
async def test_a_report_of_a_running_pod_is_taken_and_answered_with_a_directive(desk: Desk) -> None:
    status, body = await desk.post(REPORT, token=desk.token())
    assert status == 200
    assert Directive.from_json(body) == Directive(report_interval_s=10)
    last = desk.world.reports.get_report(desk.world.job.metadata.uid)
    assert last is not None
    assert (last.report.step, last.ordinal, last.received_at) == (42, (0, 0), desk.world.now)
    assert desk.enqueued == [job_key("default", "lm")]
    request = SaveRequest(id="maintenance-7", attempt=1, maintenance_time=0, time=0, reason="maintenance")
    desk.world.reports.set_save_request(desk.world.job.metadata.uid, request)
    _, body = await desk.post(REPORT, token=desk.token())
    assert Directive.from_json(body) == desk.world.reports.get_directive(desk.world.job.metadata.uid)
    assert Directive.from_json(body).checkpoint_now == "maintenance-7"


@pytest.mark.parametrize(
    ("status", "body", "token_uid", "path", "acting"),
    [
        pytest.param(401, REPORT, None, PATH, True, id="no token"),
        pytest.param(401, REPORT, "another-uid", PATH, True, id="another job's token"),
        pytest.param(404, REPORT, "", PATH.replace("lm", "other"), True, id="an unknown job"),
        pytest.param(413, b" " * (64 * 1024 + 1), "", PATH, True, id="more than 64 KB"),
        pytest.param(503, REPORT, "", PATH, False, id="an operator that doesn't act"),
        *(
            pytest.param(400, body, "", PATH, True, id=body.decode())
            for body in (b"{", b"[]", b'{"step":4}', b'{"phase":"Training","format":2}')
        ),
    ],
)
async def test_nothing_is_taken_for(
    desk: Desk, status: int, body: bytes, token_uid: str | None, path: str, acting: bool
) -> None:
    desk.acting = acting
    token = None if token_uid is None else desk.token(uid=token_uid or None)
    answered, answer = await desk.post(body, token=token, path=path)
    assert answered == status
    assert desk.world.job.metadata.uid.encode() not in answer
    assert desk.enqueued == []
    if status == 400:
        assert json.loads(answer)["error"].startswith("Report")


@pytest.mark.smoke
@pytest.mark.parametrize(
    "is_forged", [False, True], ids=["of another job", "of none, with this job's labels"]
)
async def test_a_pod_of_another_job_of_the_namespace_has_no_say(desk: Desk, *, is_forged: bool) -> None:
    pod = desk.world.pods[0]
    owner = {"kind": "Job", "name": "other-w-0", "uid": "other-job", "controller": True}
    other = {"name": "other-w-0-0-x", "namespace": "default", "labels": pod["metadata"]["labels"]}
    if not is_forged:
        other["labels"] = other["labels"] | {JOB_UID_LABEL: "another-uid"}
        other["ownerReferences"] = [owner]
    desk.world.cluster.put("pods", {**pod, "metadata": other})
    status, body = await desk.post(REPORT, token=desk.token("other-w-0-0-x"))
    assert status == 403
    why = "has no owner" if is_forged else "doesn't belong to job default/lm"
    assert json.loads(body)["error"] == f"pod other-w-0-0-x {why}"


async def test_a_pod_of_an_earlier_attempt_is_told_to_stop(desk: Desk) -> None:
    old = desk.token()
    jobset = desk.world.jobset
    assert jobset is not None
    desk.world.cluster.put("jobsets", jobset | {"status": {"restarts": 1}})
    status, body = await desk.post(REPORT, token=old)
    assert status == 409
    assert "stop reporting" in json.loads(body)["error"]


async def test_what_the_job_cannot_have_reaches_no_status(desk: Desk) -> None:
    far = Report(phase=ReportPhase.TRAINING, step=10**15).to_json()
    status, answer = await desk.post(far, token=desk.token())
    assert (status, desk.enqueued) == (400, [])
    assert json.loads(answer)["error"].startswith(
        "Report: step 1000000000000000 is far beyond spec.totalSteps"
    )
    forged = replace(training_report(7, 42, metrics={"loss\n": "\x1b[1m1\u202e"}), notice="sig\nterm")
    for uri, shown in (("javascript:alert(1)", None), ("gs://bucket/runs/lm/42/1-abc", (7, 42))):
        (commit,), head = forged.commits, forged.head
        assert head is not None
        named = replace(forged, commits=(replace(commit, uri=uri),), head=replace(head, uri=uri))
        assert (await desk.post(named.to_json(), token=desk.token()))[0] == 200
        desk.world.now += 60
        await desk.world.reconcile()
        assert desk.world.latest == shown
    progress = desk.world.status.progress
    assert progress is not None
    assert [(each.name, each.value) for each in progress.metrics] == [("loss", "[1m1")]
    assert desk.world.status.attempts[-1].notice == "sigterm"


@pytest.mark.smoke
async def test_the_posts_of_transformers_callback_are_shown_as_progress(desk: Desk) -> None:
    shown = []
    for post in json.loads(KUBEFLOW.read_text(encoding="utf-8")):
        desk.world.now += 61
        assert await desk.post(json.dumps(post).encode(), token=desk.token(), path=TRAINER_PATH) == (
            200,
            b"{}",
        )
        await desk.world.reconcile()
        progress = desk.world.status.progress
        assert progress is not None
        assert (progress.step, progress.last_progress_time) == (None, None)
        shown.append((progress.percent, progress.eta_seconds, {m.name: m.value for m in progress.metrics}))
    assert desk.enqueued == [job_key("default", "lm")] * 3
    logged = {"loss": "0.5", "learning_rate": "3e-05"}
    counts = {"current_step": "120", "total_steps": "400", "current_epoch": "1.2"}
    assert shown == [(0, None, {"total_steps": "400"}), (30, 280, logged | counts), (100, 0, logged)]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "the body: Invalid JSON"),
        (b"{}", "trainerStatus: Field required"),
        (b'{"trainerStatus": {"progressPercentage": 101}}', "trainerStatus.progressPercentage: "),
        (b'{"trainerStatus": {"metrics": [{"name": "loss"}]}}', "trainerStatus.metrics.0.value: "),
    ],
)
async def test_no_progress_is_taken_from(desk: Desk, body: bytes, why: str) -> None:
    status, answer = await desk.post(body, token=desk.token(), path=TRAINER_PATH)
    assert (status, desk.enqueued) == (400, [])
    assert json.loads(answer)["error"].startswith(why)
    assert (await desk.post(body, token=None, path=TRAINER_PATH))[0] == 401


def begun(token: str) -> bytes:
    """Return a report with the first of its 100 bytes."""
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 100\r\n\r\n{{"
    )
    return head.encode()


@pytest.mark.smoke
async def test_a_token_that_is_none_is_refused_before_the_body_is_there(desk: Desk) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", desk.client.port)
    writer.write(begun(desk.token(uid="another-uid")))
    async with asyncio.timeout(30):
        assert await reader.readline() == b"HTTP/1.1 401 Unauthorized\r\n"
    writer.close()


@pytest.mark.smoke
async def test_a_report_counts_though_its_sender_could_not_wait_for_the_answer(desk: Desk) -> None:
    desk.tokens.may_answer.clear()
    _, writer = await asyncio.open_connection("127.0.0.1", desk.client.port)
    writer.write(begun(desk.token())[:-1] + REPORT.ljust(100))
    await writer.drain()
    await desk.tokens.asked.wait()
    writer.close()
    desk.tokens.may_answer.set()
    for _ in range(3000):
        if desk.enqueued:
            break
        await asyncio.sleep(0.01)
    last = desk.world.reports.get_report(desk.world.job.metadata.uid)
    assert last is not None
    assert last.report.step == 42


async def leave(port: int, body: bytes, context: ssl.SSLContext | None, *, reset: bool) -> None:
    """Begin a request and end the connection, by a FIN or by an RST."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(body)
    await writer.drain()
    if reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_a_sender_that_goes_away_is_one_line_for_debugging(
    desk: Desk, caplog: pytest.LogCaptureFixture, *, tls: bool, reset: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    servers, context, client = Servers(), server_tls(), ssl.create_default_context()
    load_certificate(context, make_tls(("127.0.0.1",)).serving)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    port = await servers.start(desk.app, host="127.0.0.1", port=0, tls=context if tls else None)
    for number in range(1, 6):
        await leave(port, begun(desk.token()), client if tls else None, reset=reset)
        for _ in range(3000):
            seen = [each for each in caplog.records if each.name != "asyncio"]
            if len(seen) == number:
                break
            await asyncio.sleep(0.01)
    await servers.close()
    assert {(each.levelname, each.message, each.exc_info) for each in seen} == {
        ("DEBUG", "refused report", None)
    }
    assert len(seen) == 5
    assert not [each for each in caplog.records if each.levelno > logging.DEBUG]
