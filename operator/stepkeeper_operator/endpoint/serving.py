"""Run the two servers: HTTPS for pods, plain HTTP for probes and metrics."""

import asyncio
import logging
import ssl
import tempfile
from pathlib import Path
from typing import cast

from aiohttp import web
from aiohttp.http import HttpProcessingError
from typing_extensions import override

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


class _Refusal(asyncio.Protocol):
    """Close a connection above the limit."""

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).abort()


class Servers:
    """Run servers in this event loop until `close`."""

    def __init__(self) -> None:
        self._servers: list[tuple[asyncio.Server, web.AppRunner]] = []

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
        server = await asyncio.get_running_loop().create_server(
            lambda: served() if len(served.connections) < _MAX_CONNECTIONS else _Refusal(),
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else _HANDSHAKE_S,
            backlog=_BACKLOG,
        )
        self._servers.append((server, runner))
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        while self._servers:
            server, runner = self._servers.pop(0)
            server.close()
            await runner.cleanup()
