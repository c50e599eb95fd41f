"""The two servers: HTTPS for pods, plain HTTP for probes and metrics."""

import ssl
import tempfile
from pathlib import Path

from aiohttp import web

from stepkeeper_operator.endpoint.certificates import KeyPair

__all__ = ["Servers", "load_certificate", "server_tls"]

_SHUTDOWN_S = 3.0


def server_tls() -> ssl.SSLContext:
    """A context without a certificate yet; one context serves renewed certificates without a restart."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def load_certificate(context: ssl.SSLContext, serving: KeyPair) -> None:
    """New connections get this certificate."""
    # The ssl module reads certificates from files only.
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = Path(folder, "tls.crt"), Path(folder, "tls.key")
        key.touch(mode=0o600)
        key.write_bytes(serving.key_pem)
        certificate.write_bytes(serving.certificate_pem)
        context.load_cert_chain(certificate, key)


class Servers:
    """Servers that run in this loop until `close`."""

    def __init__(self) -> None:
        self._runners: list[web.AppRunner] = []

    async def start(
        self, app: web.Application, *, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> int:
        """The app is served; answers with the port, which is chosen freely for port 0."""
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await runner.setup()
        self._runners.append(runner)
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        return int(runner.addresses[0][1])

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()
