"""Credentials of the operator's client of the Cloud TPU API, with a token endpoint over the network."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from grpc import aio, ssl_server_credentials

from stepkeeper_operator.cloud_tpu.client import GoogleCloudTPU
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, CloudTPUError, ErrorKind, Place
from stepkeeper_operator.endpoint.certificates import make_tls
from tpuapi.cloud import FakeCloud
from tpuapi.wire import make_services

PLACE = Place(project="a-project", zone="us-west4-a")
NOWHERE = "127.0.0.1:1"
REFUSED = (400, {"error": "invalid_grant", "error_description": "the audience isn't of this pool"})
BUSY = (503, {"error": "temporarily_unavailable"})


class TokenEndpoint:
    """A token endpoint whose answers a test chooses."""

    def __init__(self) -> None:
        self.answer: tuple[int, dict[str, Any]] = REFUSED
        self.subject_tokens: list[str] = []
        self.url = ""

    def grant(self, token: str) -> None:
        self.answer = (200, {"access_token": token, "expires_in": 3600, "token_type": "Bearer"})

    async def reply(self, request: web.Request) -> web.Response:
        form = await request.post()
        self.subject_tokens.append(str(form["subject_token"]))
        status, body = self.answer
        return web.json_response(body, status=status)


@pytest.fixture
async def endpoint() -> AsyncIterator[TokenEndpoint]:
    tokens = TokenEndpoint()
    app = web.Application()
    app.router.add_post("/token", tokens.reply)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    tokens.url = f"http://{host}:{port}/token"
    yield tokens
    await runner.cleanup()


@pytest.fixture
def write_file(
    endpoint: TokenEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Path]:
    """Return a function that writes the configuration of a workload identity, with the subject's token."""
    path = tmp_path / "credentials.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))

    def write(subject: str) -> Path:
        token = tmp_path / f"{subject}.token"
        token.write_text(subject)
        config = {
            "type": "external_account",
            "audience": "//iam.example.com/pools/tests",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": endpoint.url,
            "credential_source": {"file": str(token)},
        }
        new = tmp_path / "credentials.new"
        new.write_text(json.dumps(config))
        new.replace(path)
        return path

    return write


@pytest.fixture
async def client() -> AsyncIterator[GoogleCloudTPU]:
    made = GoogleCloudTPU(endpoint=NOWHERE, insecure=False)
    yield made
    await made.close()


async def fail(request: Awaitable[object]) -> CloudTPUError:
    with pytest.raises(CloudTPUError) as failure:
        await request
    return failure.value


async def test_a_token_that_is_refused_is_lasting_and_asked_for_slowly_until_one_is_granted(
    endpoint: TokenEndpoint,
    write_file: Callable[[str], Path],
    client: GoogleCloudTPU,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_file("operator")
    for version in (*ApiVersion, *ApiVersion):
        error = await fail(client.list_nodes(PLACE, version))
        assert (error.kind, error.code) == (ErrorKind.CREDENTIALS, "UNAUTHENTICATED")
        assert "invalid_grant" in error.message
        assert "the audience isn't of this pool" in error.message
    assert endpoint.subject_tokens == ["operator"], "one refusal answers for all, for a while"
    endpoint.grant("a-token")
    monkeypatch.setattr("stepkeeper_operator.cloud_tpu.authorization._RETRY_S", 0.0)
    error = await fail(client.list_nodes(PLACE, ApiVersion.V2))
    assert error.kind is ErrorKind.TRANSIENT, "with its token, it finds nobody at that address"
    assert "Getting metadata" not in error.message


@pytest.mark.parametrize("answer", [BUSY, None], ids=["busy", "not there"])
async def test_a_token_endpoint_that_is_down_is_transient(
    endpoint: TokenEndpoint,
    write_file: Callable[[str], Path],
    client: GoogleCloudTPU,
    answer: tuple[int, dict[str, Any]] | None,
) -> None:
    if answer is None:
        endpoint.url = f"http://{NOWHERE}/token"
    else:
        endpoint.answer = answer
    write_file("operator")
    error = await fail(client.list_nodes(PLACE, ApiVersion.V2))
    assert (error.kind, error.code) == (ErrorKind.TRANSIENT, "UNAVAILABLE")
    assert endpoint.url in error.message


async def test_a_changed_file_is_taken_up_at_once(
    endpoint: TokenEndpoint, write_file: Callable[[str], Path], client: GoogleCloudTPU
) -> None:
    path = write_file("before")
    assert (await fail(client.list_nodes(PLACE, ApiVersion.V2))).kind is ErrorKind.CREDENTIALS
    endpoint.grant("a-token")
    write_file("after")
    assert (await fail(client.list_nodes(PLACE, ApiVersion.V2))).kind is ErrorKind.TRANSIENT
    assert endpoint.subject_tokens == ["before", "after"]
    path.unlink()
    error = await fail(client.list_nodes(PLACE, ApiVersion.V2))
    assert error.kind is ErrorKind.CREDENTIALS
    assert str(path) in error.message


_PROGRAM = """
import asyncio, sys
from stepkeeper_operator.cloud_tpu.client import GoogleCloudTPU
from stepkeeper_operator.cloud_tpu.cloud import ApiVersion, Place

async def main():
    client = GoogleCloudTPU(endpoint=sys.argv[1], insecure=False)
    for version in ApiVersion:
        print(len(await client.list_nodes(Place(project="a-project", zone="us-west4-a"), version)))
    await client.close()

asyncio.run(main())
"""
"""List nodes, in a process of its own: the variable with the roots is read once in a process."""


class Doorkeeper(aio.ServerInterceptor):  # type: ignore[misc]  # gRPC ships no types
    """Notes what requests show."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        self.shown += [value for key, value in details.invocation_metadata if key == "authorization"]
        return await continuation(details)


async def test_requests_carry_the_token_to_a_server_with_tls(
    endpoint: TokenEndpoint, write_file: Callable[[str], Path], tmp_path: Path, tpu: FakeCloud
) -> None:
    endpoint.grant("a-token")
    write_file("operator")
    tls, door = make_tls(("localhost",)), Doorkeeper()
    roots = tmp_path / "roots.pem"
    roots.write_bytes(tls.ca.certificate_pem)
    server = aio.server(interceptors=[door])
    server.add_generic_rpc_handlers(make_services(tpu))
    pair = (tls.serving.key_pem, tls.serving.certificate_pem)
    port = server.add_secure_port("127.0.0.1:0", ssl_server_credentials([pair]))
    await server.start()
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PROGRAM, f"localhost:{port}"),
        env={**os.environ, "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(roots)},
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await program.communicate()
    await server.stop(grace=None)
    assert (program.returncode, said) == (0, b"0\n0\n")
    assert door.shown == ["Bearer a-token"] * 2
    assert endpoint.subject_tokens == ["operator"], "one token for both versions"
