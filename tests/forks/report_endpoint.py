"""Stand in for the operator: an HTTPS server that keeps the reports of a trainer, and answers them."""

import datetime as dt
import ipaddress
import json
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typing_extensions import override

from stepkeeper.contract import Directive, Report

__all__ = ["Operator", "make_certificate"]

PATH = "/v1/namespaces/default/jobs/lm/report"


class Operator:
    """Keeps every report, answers each with what `answer` says."""

    def __init__(self, folder: Path) -> None:
        self.reports: list[Report] = []
        self.tokens: set[str] = set()
        self.answer: Callable[[Report], Directive] = lambda _: Directive()
        self.more: dict[str, object] = {}
        """What a later version adds to each answer."""

        self.status = 200
        self.came = threading.Condition()
        operator = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == PATH
                report = Report.from_json(body)
                with operator.came:
                    operator.tokens.add(self.headers["Authorization"])
                    operator.reports.append(report)
                    operator.came.notify_all()
                answer = json.dumps(json.loads(operator.answer(report).to_json()) | operator.more).encode()
                self.send_response(operator.status)
                self.end_headers()
                self.wfile.write(answer)

            @override
            def log_message(self, format: str, *args: object) -> None:  # the base class's name
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "tls.key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.server.server_port}{PATH}"

    def wait_for(self, wanted: Callable[[Report], bool]) -> Report:
        def found() -> Report | None:
            return next((report for report in self.reports if wanted(report)), None)

        with self.came:
            # A trainer that has just been started imports torch first.
            assert self.came.wait_for(lambda: found() is not None, 120), self.reports
        report = found()
        assert report is not None
        return report

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def make_certificate(folder: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "operator")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "tls.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
