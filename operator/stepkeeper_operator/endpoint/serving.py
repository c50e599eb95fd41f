"""Run the two servers: HTTPS for pods, plain HTTP for probes and metrics."""

import ssl
import tempfile
from pathlib import Path

from aiohttp import web

from stepkeeper_operator.endpoint.certificates import KeyPair

__all__ = ["Servers", "load_certificate", "server_tls"]

_SHUTDOWN_S = 3.0


def server_tls() -> ssl.SSLContext:
    """Make a TLS context without a certificate. One context serves renewed certificates without a restart."""
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


class Servers:
    """Run servers in this event loop until `close`."""

    def __init__(self) -> None:
        self._runners: list[web.AppRunner] = []

    async def start(
        self, app: web.Application, *, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> int:
        """Serve the app. Return the port; port 0 picks a free one."""
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        self._runners.append(runner)
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        return int(runner.addresses[0][1])

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()
