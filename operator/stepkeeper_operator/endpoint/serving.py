"""Run the two servers: HTTPS for pods, plain HTTP for probes and metrics."""

import asyncio
import logging
import socket
import ssl
import tempfile
from pathlib import Path

from aiohttp import web
from aiohttp.http import HttpProcessingError

from stepkeeper_operator.endpoint.certificates import KeyPair

__all__ = ["Servers", "load_certificate", "server_tls"]

_SHUTDOWN_S = 3.0
_IDLE_S = 5.0
"""Seconds that an idle connection is kept open after an answer."""

_BACKLOG = 4096
"""Connections that can wait in the kernel when all jobs report at once."""

_HANDSHAKE_S = 5.0
_MAX_CONNECTIONS = 250
"""Most open connections: each takes up to half a MiB with TLS. Others are closed, and companions retry."""

_RETRY_S = 1.0

_MAX_HEADERS = 32
"""Most headers of a request, each of at most 8 KiB. They are in memory before any check of the request."""

_log = logging.getLogger(__name__)


def server_tls() -> ssl.SSLContext:
    """Make a TLS context without a certificate. It can serve renewed certificates without a restart."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def load_certificate(context: ssl.SSLContext, serving: KeyPair) -> None:
    """Serve this certificate to new connections."""
    # The ssl module reads certificates from files only.
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = Path(folder, "tls.crt"), Path(folder, "tls.key")
        key.touch(mode=0o600)
        key.write_bytes(serving.key_pem)
        certificate.write_bytes(serving.certificate_pem)
        context.load_cert_chain(certificate, key)


def _is_about_the_server(record: logging.LogRecord) -> bool:
    """Return False for a malformed request: its sender gets 400, and anyone can send any number of them."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_log.addFilter(_is_about_the_server)


class Servers:
    """Run servers in this event loop until `close`."""

    def __init__(self) -> None:
        self._servers: list[tuple[asyncio.Task[None], socket.socket, web.AppRunner]] = []

    async def start(
        self, app: web.Application, *, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> int:
        """Serve the app. Return the port; port 0 picks a free one."""
        runner = web.AppRunner(
            app,
            access_log=None,
            logger=_log,
            shutdown_timeout=_SHUTDOWN_S,
            keepalive_timeout=_IDLE_S,
            auto_decompress=False,  # a small compressed body could fill the memory
            max_headers=_MAX_HEADERS,
        )
        await runner.setup()
        served = runner.server
        assert served is not None  # set by setup
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        listening.setblocking(False)
        self._servers.append((asyncio.create_task(_accept(listening, served, tls)), listening, runner))
        bound: int = listening.getsockname()[1]
        return bound

    async def close(self) -> None:
        while self._servers:
            accepting, listening, runner = self._servers.pop(0)
            accepting.cancel()
            await asyncio.wait([accepting])
            listening.close()
            await runner.cleanup()


async def _accept(listening: socket.socket, served: web.Server, tls: ssl.SSLContext | None) -> None:
    """Accept connections, and close those above the limit.

    A server of asyncio would count a connection only after its handshake, and accept any number of them before.
    """
    opening: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as group:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listening)
            except OSError as error:  # such as too many open files
                _log.warning("cannot accept connections", extra={"error": str(error)})
                await asyncio.sleep(_RETRY_S)
                continue
            if len(served.connections) + len(opening) >= _MAX_CONNECTIONS:
                connection.close()
                await asyncio.sleep(0)  # sock_accept doesn't let the loop turn while connections wait
                continue
            task = group.create_task(_open(connection, served, tls))
            opening.add(task)
            task.add_done_callback(opening.discard)


async def _open(connection: socket.socket, served: web.Server, tls: ssl.SSLContext | None) -> None:
    """Serve the connection, after its handshake."""
    limit_s = None if tls is None else _HANDSHAKE_S
    loop = asyncio.get_running_loop()
    try:
        await loop.connect_accepted_socket(served, connection, ssl=tls, ssl_handshake_timeout=limit_s)
    except OSError:
        pass  # the sender went away, or speaks no TLS
    except Exception:  # of one connection, which must not end the server
        _log.exception("cannot serve a connection")
        connection.close()
