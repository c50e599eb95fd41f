"""Stand in for the operator: an HTTPS server that keeps the reports of a trainer, and answers them."""

import json
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from typing_extensions import override

from stepkeeper.contract import Directive, Report
from stepkeeper_operator.endpoint.certificates import make_tls

PATH = "/v1/namespaces/default/jobs/lm/report"


class Operator:
    """Keeps every report, answers each with what `answer` says. In `folder` it puts the CA that pods trust."""

    def __init__(self, folder: Path) -> None:
        tls, pair = make_tls(("127.0.0.1",)), folder / "tls.pem"
        (folder / "ca.crt").write_bytes(tls.ca.certificate_pem)
        pair.write_bytes(tls.serving.key_pem + tls.serving.certificate_pem)
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
        context.load_cert_chain(pair)
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
