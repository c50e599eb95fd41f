"""Test the limits of the operator's servers over real sockets."""

import asyncio
import socket
import ssl
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web

from stepkeeper_operator.endpoint import serving
from stepkeeper_operator.endpoint.certificates import make_tls
from stepkeeper_operator.endpoint.serving import Servers, load_certificate, server_tls


async def test_a_full_server_closes_what_comes_and_serves_what_it_has() -> None:
    servers = Servers()
    port = await servers.start(web.Application(), host="127.0.0.1", port=0)
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(251)]
    async with asyncio.timeout(30):
        with suppress(ConnectionResetError):
            assert await opened[-1][0].read() == b""
        reader, writer = opened[0]
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 404 Not Found\r\n"
    for _, each in opened:
        each.close()
        with suppress(ConnectionError):
            await each.wait_closed()
    await servers.close()


async def test_connections_in_their_handshake_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_MAX_CONNECTIONS", 3)
    monkeypatch.setattr(serving, "_HANDSHAKE_S", 300.0)
    servers, context, client = Servers(), server_tls(), ssl.create_default_context()
    load_certificate(context, make_tls(("127.0.0.1",)).serving)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    port = await servers.start(web.Application(), host="127.0.0.1", port=0, tls=context)
    async with asyncio.timeout(60):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        with pytest.raises(OSError):  # noqa: PT011  # its text is the operating system's
            await asyncio.open_connection("127.0.0.1", port, ssl=client)
        silent[0][1].close()
        while True:  # until the server has noticed
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
                break
            await asyncio.sleep(0.01)
        await servers.close()
    for _, each in (*silent, (None, writer)):
        each.close()


async def check_serving(host: str, port: int) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await reader.readline() == b"HTTP/1.1 404 Not Found\r\n"
    writer.close()
    await writer.wait_closed()


async def test_a_full_server_lets_other_work_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more connection waits whenever one is accepted, as in a flood."""
    monkeypatch.setattr(serving, "_MAX_CONNECTIONS", 0)
    servers, loop = Servers(), asyncio.get_running_loop()
    others: list[socket.socket] = []

    async def accept(_: socket.socket) -> tuple[socket.socket, object]:
        assert len(others) < 1000, "the loop has not turned"
        others.append(one := socket.socket())
        return one, None

    monkeypatch.setattr(loop, "sock_accept", accept)
    await servers.start(web.Application(), host="127.0.0.1", port=0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert 1 < len(others) < 20
    await servers.close()


async def test_an_error_of_one_connection_leaves_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    servers, loop = Servers(), asyncio.get_running_loop()
    connect, errors = loop.connect_accepted_socket, [RuntimeError("none of its own")]

    async def connect_accepted_socket(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return await connect(*arguments, **options)

    monkeypatch.setattr(loop, "connect_accepted_socket", connect_accepted_socket)
    port = await servers.start(web.Application(), host="127.0.0.1", port=0)
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.close()
        await check_serving("127.0.0.1", port)
    assert "cannot serve a connection" in caplog.messages
    await servers.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
async def test_a_host_may_be_of_ipv6() -> None:
    servers = Servers()
    port = await servers.start(web.Application(), host="::1", port=0)
    await check_serving("::1", port)
    await servers.close()
